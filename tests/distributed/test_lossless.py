"""Nothing is lost with a rank: lost stages are rebuilt, and ranks that missed an agreement learn of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from horizonml.comm.expected import instance, plain
from horizonml.comm.group import Group
from horizonml.data.choose import describe, load
from horizonml.data.dataset import DataInfo
from horizonml.data.sampler import Sampler
from horizonml.engine.session import Session
from horizonml.errors import PeerLost
from horizonml.files import cache_folder
from horizonml.job.schema import Job
from horizonml.plan.plan import Plan, Stage
from horizonml.runtime.agreement import model_for
from horizonml.runtime.life import Last
from horizonml.runtime.restore import crowded, rebuild
from horizonml.runtime.trainer import training_batch
from horizonml.state.carry import move, senders
from horizonml.state.mirror import Mirror, Report, beside, buddies, keepers, owners, rebuilds
from horizonml.state.resume import Held, Memory, Recovery, newest
from horizonml.state.shards import Best
from horizonml.state.train_state import Prepared, TrainState
from horizonml.tasks.choose import task_for
from horizonml.tasks.task import Batch
from tests.distributed.pool import Pool
from tests.distributed.sessions import agreed_state, copies_in, state_of
from tests.distributed.truth import expect_same

ONE, LAYERS, LR = (1.0,), 15, 0.1
CLIP_NORM = 0.5  # less than the norm of most steps
TIED_LAYERS = 14  # of a model whose first and last layer share a parameter
BOUNDS = [(0, 5), (5, 9), (9, LAYERS)]
PIPELINE = Plan(tuple(Stage(*bounds, (rank,), ONE) for rank, bounds in enumerate(BOUNDS)), micro_batches=3)
PLANS = {
    "pipeline": PIPELINE,
    "int8": Plan(tuple(Stage(s.start, s.stop, s.ranks, ONE, send="int8") for s in PIPELINE.stages), micro_batches=3),
    "int4": Plan(tuple(Stage(s.start, s.stop, s.ranks, ONE, send="int4") for s in PIPELINE.stages), "zb-h1", 3),
    "interleaved": Plan(
        tuple(
            Stage(start, stop, (number % 3,), ONE)
            for number, (start, stop) in enumerate(itertools.pairwise((0, 2, 5, 7, 10, 12, LAYERS)))
        ),
        "interleaved",
        3,
    ),
    "tied": Plan((Stage(0, 5, (0,), ONE), Stage(5, 9, (1,), ONE), Stage(9, TIED_LAYERS, (2,), ONE)), micro_batches=2),
    "modules": Plan((Stage(0, 2, (0,), ONE), Stage(2, 4, (1,), ONE), Stage(4, 6, (2,), ONE)), micro_batches=2),
    # The first two ranks hold frozen layers only.
    "frozen": Plan((Stage(0, 3, (0,), ONE), Stage(3, 9, (1,), ONE), Stage(9, 14, (2,), ONE)), micro_batches=3),
    "tied before members": Plan((Stage(0, 5, (0,), ONE), Stage(5, TIED_LAYERS, (1, 2), (1.0, 1.0))), micro_batches=2),
    "before members": Plan((Stage(0, 6, (0,), ONE), Stage(6, LAYERS, (1, 2), (1.0, 1.0))), micro_batches=3),
    "between members": Plan(
        (Stage(0, 6, (0, 1), (1.0, 1.0)), Stage(6, 9, (2,), ONE), Stage(9, LAYERS, (3, 4), (2.0, 1.0))),
        micro_batches=2,
    ),
}


# Models other than the usual one: one is cut by its modules, and one begins with the weights of a file.
MODELS = {
    "tied": "LanguageModel",
    "tied before members": "LanguageModel",
    "modules": "StubbornUNet",
    "frozen": "backbone",
}


def job(name: str = "", clip_norm: float | None = None, file: Path | None = None) -> Job:
    """A job; where gradients are clipped, parameters are averaged, too."""
    weights = {} if file is None else {"weights": str(file), "freeze": ["[0-8].*"]}
    return Job.model_validate(
        {
            "batch_size": 24,
            "model": {"name": f"tests.models:{MODELS.get(name, 'normed')}", **weights},
            "data": {"name": "digits", "samples": 85},  # the last batch of an epoch is smaller
            "optimizer": {"momentum": 0.9, "lr": LR, "clip_norm": clip_norm},
            "lr_schedule": {"name": "constant"},
            "ema": {"decay": None if clip_norm is None else 0.9},
        }
    )


def described() -> DataInfo:
    info = describe(job().data)
    assert info is not None
    return info


class Batches:
    """The global batches of a job's steps."""

    def __init__(self) -> None:
        info = described()
        self._data = load(job().data, info, cache_folder() / "data", inputs=True, targets=True)
        self._sampler = Sampler(info.train, job().batch_size, job().seed)

    def __getitem__(self, step: int) -> Batch:
        return training_batch(job(), self._data, self._sampler, *divmod(step, self._sampler.steps_per_epoch))


def session_on(plan: Plan, state: TrainState, group: Group) -> Session:
    return Session(plan, state, group, task_for(job(), described()), job().batch_size)


def fresh(name: str = "", clip_norm: float | None = None, file: Path | None = None) -> TrainState:
    own = job(name, clip_norm, file)
    return TrainState(model_for(own, described()), own.optimizer, own.ema)


def lose(
    rank: int,
    world_size: int,
    store: Store,
    name: str,
    lost: int | tuple[int, ...],
    steps: int,
    bytes_per_second: float,
    clip_norm: float | None,
    file: Path | None = None,
    mirrors: int = 1,
) -> dict[str, Tensor] | str:
    """Train with a mirror; without the lost ranks, rebuild what they held. Return their state, and the one rebuilt."""
    lost = (lost,) if isinstance(lost, int) else lost
    torch.set_num_threads(1)
    plan, batches, state = PLANS[name], Batches(), fresh(name, clip_norm, file)
    group = Group(PrefixStore("all", store), rank, world_size, 30.0)
    session = session_on(plan, state, group)
    mirror = Mirror(plan, state, group, lambda _: bytes_per_second, 1.0, 1 << 30, mirrors)
    for step in range(steps):
        mirror.before_step(1.0)
        session.step(batches[step], LR)
        mirror.after_step()
    if rank in lost:
        found = state_of(session)
        session.close()
        group.close()
        return found
    session.close()
    group.close()
    members = [other for other in range(world_size) if other not in lost]
    group = Group(PrefixStore("left", store), members.index(rank), len(members), 30.0, started_as=members)
    recovery = agreed_state(state, True, group)
    assert recovery is not None
    gone = [layer for stage in plan.stages if set(stage.ranks) <= {*lost} for layer in range(stage.start, stage.stop)]
    stateful = set(state.model.parameter_names.values())
    assert recovery.missing == [layer for layer in gone if layer in stateful]
    last = Last(1, list(range(world_size)), mirror)
    own = job(name, clip_norm, file)
    rebuilt = rebuild(own, described(), state, last, recovery, group, copies_in(group, last))
    group.close()
    if isinstance(rebuilt, str):
        return rebuilt
    builder = {holder for layer in recovery.missing for holder in rebuilt.holders[layer]}
    if mirrors == 1:
        assert builder == {members.index(buddies(plan)[lost[0]][0])}
    again = {key: value.clone() for key, value in state.tensors().items() if state.layer_of(key) in recovery.missing}
    return again if group.rank in builder else {}


FAST, SLOW = 1e9, 12_000.0  # bytes per second: a copy with every step, or one in several


@pytest.mark.parametrize(
    ("name", "lost", "steps", "bytes_per_second", "clip_norm"),
    [
        ("pipeline", 0, 13, SLOW, None),
        ("pipeline", 1, 9, FAST, None),
        ("pipeline", 1, 2, 1.0, None),  # before the first copy, from its initial values
        ("pipeline", 2, 9, SLOW, CLIP_NORM),
        ("int4", 2, 9, SLOW, None),
        ("interleaved", 1, 9, SLOW, CLIP_NORM),
        ("tied", 2, 9, SLOW, None),
        ("tied before members", 0, 9, SLOW, CLIP_NORM),
        ("modules", 2, 9, SLOW, None),
        ("between members", 2, 9, SLOW, None),
    ],
)
def test_a_lost_stage_is_rebuilt_bit_for_bit(
    pool: Pool, name: str, lost: int, steps: int, bytes_per_second: float, clip_norm: float | None
) -> None:
    rebuilt = expect_rebuilt(pool, name, lost, steps, bytes_per_second, clip_norm)
    assert any(key.startswith("optimizer/") for key in rebuilt)
    assert any(key.endswith("/average") for key in rebuilt) == (clip_norm is not None)


def expect_rebuilt(pool: Pool, name: str, lost: int, *arguments: Any) -> dict[str, Tensor]:
    results = pool.run(PLANS[name].world_size, lose, name, lost, *arguments)
    (rebuilt,) = [found for rank, found in enumerate(results) if rank != lost and found]
    assert not isinstance(rebuilt, str), rebuilt
    expect_same(rebuilt, results[lost])
    return rebuilt


PLANS |= {
    "four": Plan(
        tuple(Stage(*bounds, (rank,), ONE) for rank, bounds in enumerate(itertools.pairwise((0, 4, 8, 12, LAYERS)))),
        micro_batches=3,
    ),
    "two and two": Plan((Stage(0, 6, (0, 1), (2.0, 1.0)), Stage(6, LAYERS, (2, 3), (1.0, 1.0))), micro_batches=2),
    "one, two, one": Plan(
        (Stage(0, 4, (0,), ONE, send="int8"), Stage(4, 9, (1, 2), (1.0, 1.0)), Stage(9, LAYERS, (3,), ONE)),
        micro_batches=2,
    ),
    "tied, four": Plan(
        tuple(Stage(*b, (rank,), ONE) for rank, b in enumerate(itertools.pairwise((0, 4, 8, 12, TIED_LAYERS)))),
        micro_batches=2,
    ),
}
PLANS["one, three"] = Plan((Stage(0, 6, (0,), ONE), Stage(6, LAYERS, (1, 2, 3), (1.0, 2.0, 1.0))), micro_batches=2)
MODELS["tied, four"] = "LanguageModel"


@pytest.mark.parametrize(
    ("name", "lost", "steps", "bytes_per_second", "clip_norm"),
    [
        ("four", (1, 2), 9, SLOW, None),  # neighbours, each of which has the messages to the other
        ("four", (0, 3), 9, SLOW, CLIP_NORM),
        ("four", (0, 2), 2, SLOW, None),  # before the first copy
        ("tied, four", (0, 1), 9, SLOW, None),
        ("two and two", (0, 1), 9, SLOW, CLIP_NORM),  # all members of a stage
        ("two and two", (2, 3), 13, FAST, None),
        ("one, two, one", (0, 2), 9, SLOW, None),  # a stage, and one of two members that sent messages to it
        ("one, two, one", (1, 2), 9, SLOW, CLIP_NORM),
        ("one, two, one", (1, 3), 9, SLOW, None),  # one of two members, and who keeps the other copy of their stage
        ("one, three", (0, 1), 9, SLOW, None),  # the messages from one of three members are computed again
    ],
)
def test_what_two_ranks_held_is_rebuilt_bit_for_bit(
    pool: Pool, name: str, lost: tuple[int, ...], steps: int, bytes_per_second: float, clip_norm: float | None
) -> None:
    results = pool.run(4, lose, name, lost, steps, bytes_per_second, clip_norm, None, 2)
    rebuilt: dict[str, Tensor] = {}
    for rank, found in enumerate(results):
        assert not isinstance(found, str), found
        if rank not in lost:
            rebuilt |= found
    plan = PLANS[name]
    alone = [rank for rank in lost if any({*stage.ranks} <= {*lost} for stage in plan.stages if rank in stage.ranks)]
    for rank in alone:
        assert results[rank]
        expect_same({key: value for key, value in rebuilt.items() if key in results[rank]}, results[rank])


LAYOUTS = [(1, 1, 1, 1), (2, 2), (1, 2, 1), (1, 3), (3, 1), (1, 1, 3), (2, 3), (1, 4), (1, 3, 1), (1, 2, 2)]


@pytest.mark.parametrize("counts", LAYOUTS, ids=str)
def test_any_two_ranks_can_be_rebuilt(counts: tuple[int, ...]) -> None:
    edges = [0, *itertools.accumulate(counts)]
    plan = Plan(
        tuple(
            Stage(n, n + 1, tuple(range(first, end)), ONE * (end - first))
            for n, (first, end) in enumerate(itertools.pairwise(edges))
        )
    )
    holders = {owner: {*ranks} | beside(plan, owner) for owner, ranks in buddies(plan, 2).items()}
    for lost in itertools.combinations(range(plan.world_size), 2):
        missing = [number for number, stage in enumerate(plan.stages) if {*stage.ranks} <= {*lost}]
        reports = {
            rank: Report({owner: [4] for owner, ranks in holders.items() if rank in ranks}, 4)
            for rank in range(plan.world_size)
            if rank not in lost
        }
        found = rebuilds(plan, missing, reports, (), 2)
        assert found is not None, lost
        assert {number for one in found for owner in one.owners for number in plan.stages_of(owner)} >= {*missing}


def test_over_a_link_that_is_too_slow_nothing_is_mirrored(pool: Pool) -> None:
    results = pool.run(3, lose, "pipeline", 1, 5, 1.0, None)
    assert isinstance(results[1], dict)
    assert {results[0], results[2]} == {
        "a rank and the copy of its state were lost together, or the copy cannot be used"
    }


def test_a_state_that_was_dropped_counts_only_once_it_is_whole_again() -> None:
    state = fresh()
    state.take([(0, LAYERS)])
    state.step = 7
    everything = state.layers()
    assert everything
    state.prepared = Prepared({}, {}, LR)
    state.drop()
    state.take([(0, LAYERS)])  # with initial values
    assert (state.layers(), state.prepared) == ([], None)
    tensors = {name: tensor.clone() for name, tensor in state.tensors().items()}
    state.load(tensors.__getitem__, tensors)  # of a step on which the ranks have not agreed yet
    assert state.layers() == []
    state.restart()
    assert (state.step, state.layers()) == (0, everything)


def test_only_stages_with_one_member_are_mirrored() -> None:
    assert owners(PIPELINE) == {0: 1, 1: 1, 2: 1}
    assert buddies(PIPELINE) == {0: (1,), 1: (2,), 2: (0,)}
    assert [keepers(PIPELINE, rank) for rank in range(3)] == [{1}, {0, 2}, {1}]
    between = PLANS["between members"]
    assert owners(between) == {2: 1}
    assert keepers(between, 2) == {0, 1, 3, 4}
    assert buddies(between) == {2: (3,)}
    assert list(owners(PLANS["interleaved"])) == [0, 1, 2]
    assert keepers(PLANS["interleaved"], 1) == {0, 2}
    assert owners(Plan((Stage(0, LAYERS, (0,), ONE),))) == {}
    assert buddies(PLANS["four"], 2) == {0: (1, 2), 1: (2, 3), 2: (3, 0), 3: (0, 1)}
    assert buddies(PLANS["four"], 2, ["a", "a", "b", "b"]) == {0: (2, 1), 1: (2, 3), 2: (0, 3), 3: (0, 1)}
    assert buddies(PLANS["one, two, one"], 2) == {0: (1, 2), 1: (3,), 3: (0, 1)}


def test_where_memory_is_short_nothing_is_mirrored() -> None:
    assert crowded(PIPELINE, [10, 20, 30], [1000.0, 1000.0, 1000.0]) is None
    # Rank 2 sends a copy of its own state, and keeps two of rank 1's.
    assert crowded(PIPELINE, [10, 20, 30], [1000.0, 1000.0, 139.0]) == (2, 70)
    assert crowded(PIPELINE, [10, 20, 30], [1000.0, 1000.0, 141.0]) is None
    assert crowded(PLANS["before members"], [10, 0, 0], [30.0, 10.0, 100.0]) == (1, 20)
    # With two mirrors, rank 2 keeps three copies of each of the others' states.
    assert crowded(PIPELINE, [10, 20, 30], [1000.0, 1000.0, 239.0], None, 2) == (2, 120)


def test_a_stage_that_was_lost_with_its_copy_cannot_be_rebuilt() -> None:
    report, none = Report({1: [4]}, 4), Report({}, 4)
    assert rebuilds(PIPELINE, [6], {0: report, 2: report}) is not None
    assert rebuilds(PIPELINE, [6], {0: report}) is None  # a neighbour's messages are missing
    assert rebuilds(PIPELINE, [6], {0: report, 2: none}) is not None
    assert rebuilds(PIPELINE, [6], {0: none, 2: none}) is None
    assert rebuilds(PIPELINE, [6], {0: Report({}, 5), 2: report}) is None  # from after the copy
    assert rebuilds(PLANS["before members"], [7], {0: report}) is None  # had members, and all are lost


def test_the_newest_step_counts_and_who_is_prepared_for_it_has_it() -> None:
    assert newest([None, None], [True]) is None
    behind, prepared, ahead = Held(4, None, (0, 1)), Held(4, 5, (0, 1)), Held(5, None, (0,))
    assert newest([behind, prepared, ahead], [True, True]) == Recovery(5, [[1, 2], [1]])
    assert newest([behind, behind, None], [True, True]) == Recovery(4, [[0, 1], [0, 1]])
    found = newest([behind, ahead], [True, True, False])
    assert found == Recovery(5, [[1], [], [0, 1]])
    assert found.missing == [1]
    memory = Memory(prepared, 0.5, {"step": 4}, {"kept": Best(metric="held_out_loss", value=0.5, step=3)})
    assert instance(Memory)(plain(memory)) == memory
    for damaged in (None, [1], {"step": True}, {"step": "4"}, {"step": 4, "next": 5, "layers": ["0"]}):
        with pytest.raises(ValueError, match=r"valid|object|required"):
            instance(Held)(damaged)


EVERYONE = -1


def miss(
    rank: int, world_size: int, store: Store, plan: Plan, method: str, missing: int | None, clip_norm: float | None
) -> tuple[dict[str, Tensor], bool]:
    """Train; in step 3 a rank loses the others as soon as `method` has returned there. All meet again and go on."""
    torch.set_num_threads(1)
    batches, state = Batches(), fresh("", clip_norm)
    group = Group(PrefixStore("first", store), rank, world_size, 30.0)
    session = session_on(plan, state, group)
    prepared = False
    for step in range(3):
        session.step(batches[step], LR)
    if missing in (rank, EVERYONE):
        owners: dict[str, object] = {"after_sums": session._check, "agree": session._totals}
        owner = owners.get(method, session)
        broken: Callable[..., Any] = getattr(owner, method)

        def once_more(*arguments: Any) -> None:
            broken(*arguments)
            raise PeerLost("a peer closed its connection")

        setattr(owner, method, once_more)
        with pytest.raises(PeerLost):
            session.step(batches[3], LR)
        prepared = state.prepared is not None
    elif missing is not None:
        session.step(batches[3], LR)
    session.close()
    if missing is not None:
        group.close()
        group = Group(PrefixStore("second", store), rank, world_size, 30.0)
        recovery = agreed_state(state, True, group)
        assert recovery is not None
        assert recovery.step == (3 if missing == EVERYONE else 4)
        move(state, senders(recovery.holders, plan), group)
        state.step = recovery.step
    session = session_on(plan, state, group)
    for step in range(state.step, 6):
        session.step(batches[step], LR)
    found = state_of(session)
    session.close()
    group.close()
    return found, prepared


DDP = Plan((Stage(0, LAYERS, (0, 1, 2), (1.0, 1.0, 1.0)),))
MISSED = [  # a plan, what the agreement ends with, whether only the agreement is missing then, the clipping, and who
    (DDP, "_reduce", False, None, 2),  # a member that has no sums receives the state of the others
    (PIPELINE, "agree", True, None, 0),
    (DDP, "after_sums", True, CLIP_NORM, 0),
    (PIPELINE, "agree", True, None, EVERYONE),  # and all repeat the step
    (PLANS["before members"], "after_sums", True, CLIP_NORM, 2),
]
IDS = ["ddp", "pipeline", "ddp, clipped", "pipeline, all ranks", "hybrid, clipped"]


@pytest.mark.parametrize(("plan", "method", "prepared", "clip_norm", "missing"), MISSED, ids=IDS)
def test_who_misses_the_agreement_learns_of_it(
    pool: Pool, plan: Plan, method: str, prepared: bool, clip_norm: float | None, missing: int
) -> None:
    straight = pool.run(3, miss, plan, method, None, clip_norm)
    results = pool.run(3, miss, plan, method, missing, clip_norm)
    assert results[missing][1] == prepared
    for (state, _), (expected, _) in zip(results, straight, strict=True):
        expect_same(state, expected)
