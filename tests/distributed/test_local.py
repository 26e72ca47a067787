"""Local steps: replicas that train by themselves, what travels between them, and what they agree on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from horizonml.comm.group import Group
from horizonml.comm.work import Work
from horizonml.engine.local_steps import Kept, LocalSession, done_by, open_session
from horizonml.engine.session import Wishes
from horizonml.errors import Diverged, PeerLost, PlanError
from horizonml.plan.local import Local
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.state.spec import Adam, Ema, Sgd
from horizonml.state.train_state import TrainState
from horizonml.tasks.classification import Classification
from tests.distributed.pool import Pool
from tests.distributed.sessions import agreed_state, built, session_for, state_of
from tests.distributed.truth import FULL, LR, Case, RandomBatch, distance, torchs, train

PLAIN = Sgd(momentum=0.0, weight_decay=1e-3)
DILOCO: dict[str, Any] = {"learning_rate": 0.7, "momentum": 0.9}
AVERAGING = Local(1, learning_rate=1.0, momentum=0.0)  # every step, by plain averages: the same as sums of gradients


@dataclass(frozen=True)
class Locally(Case):
    """A plan whose members take local steps."""

    local: Local | None = None

    def plan(self, layers: int) -> Plan:
        plan = super().plan(layers)
        stages = tuple(replace(stage, sync=Sync.LOCAL) for stage in plan.stages)
        return replace(plan, stages=stages, local=self.local)


def two(local: Local, **other: Any) -> Locally:
    return Locally("two members", ((1.0, 1.0),), local=local, **other)


def refused(rank: int, world_size: int, store: Store, case: Locally) -> str:
    """What is said of a plan that cannot be trained."""
    model = model_of(case)
    group = Group(store, rank, world_size, 30.0)
    with pytest.raises(PlanError) as error:
        session_for(case.plan(len(model.chain)), model, group, case.optimizer, FULL)
    group.close()
    return str(error.value)


def test_a_parameter_that_two_stages_of_a_replica_share_is_refused(pool: Pool) -> None:
    case = Locally("tied", ((1.0, 1.0), (1.0, 1.0)), local=Local(4), model="LanguageModel")
    for told in pool.run(4, refused, case):
        assert told.startswith("parallel.sync: layers in different stages share a parameter")


class Counting(Group):
    """A group that counts what its rank sends, and to whom."""

    def __init__(self, *arguments: Any) -> None:
        self.counted: list[tuple[int, int]] = []  # bytes, and the number of ranks that take part
        super().__init__(*arguments)

    def within(self, ranks: Sequence[int]) -> Group:
        part = super().within(ranks)
        assert isinstance(part, Counting)
        part.counted = []  # what stays in a replica
        return part

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        self.counted.append((tensor.nbytes, 2))
        return super().send(tensor, peer, tag)

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...], stage: int = 0) -> Work:
        self.counted.append((tensor.nbytes, len(ranks)))
        return super().all_reduce(tensor, ranks, stage)

    def _gather(self, into: list[Tensor], own: Tensor) -> None:
        self.counted.append((own.nbytes, len(into)))
        super()._gather(into, own)


def model_of(case: Case) -> Any:
    return built(f"tests.models:{case.model}")


@pytest.mark.parametrize(
    ("members", "micros", "model"),
    [
        (((1.0,) * 3,), 1, "normed"),
        (((1.0, 1.0), (1.0, 1.0)), 3, "plain"),
    ],
    ids=["ddp 3, normed", "2 replicas of a pipeline, in micro-batches"],
)
def test_averaging_after_every_step_equals_sums_of_gradients(
    pool: Pool, members: tuple[tuple[float, ...], ...], micros: int, model: str
) -> None:
    case = Case("exact", members, micros, model=model, optimizer=PLAIN)
    locally = Locally("local", members, micros, model=model, optimizer=PLAIN, local=AVERAGING)
    exact = pool.run(case.world_size, train, case, 3)
    for (expected, _), (state, reports) in zip(exact, pool.run(case.world_size, train, locally, 3), strict=True):
        assert [report.local_steps for report in reports] == [1] * 3
        for key in expected:
            if key.startswith("model/"):
                assert distance(state[key], expected[key]) < 1e-5, key


def synchronise(
    rank: int, world_size: int, store: Store, case: Locally, steps: int, ema: Ema | None = None
) -> tuple[dict[str, Tensor], list[Any], list[tuple[int, int]]]:
    """Train, and end with one set of parameters; return the state, the steps, and what was sent in each."""
    model = model_of(case)
    group = Counting(store, rank, world_size, 30.0)
    session = session_for(case.plan(len(model.chain)), model, group, case.optimizer, FULL, ema=ema)
    reports, sent = [], []
    for step in range(steps):
        before = len(group.counted)
        reports.append(session.step(RandomBatch(step), LR, Wishes(full=step == steps - 1)))
        sent.append((sum(size for size, _ in group.counted[before:]), len(group.counted) - before))
    state = state_of(session)
    session.close()
    group.close()
    return state, reports, sent


@pytest.mark.parametrize(
    ("local", "model"),
    [
        (Local(4, format="int4", **DILOCO), "LanguageModel"),
        (Local(4, format="topk", **DILOCO), "frozen"),
        (Local(6, fragments=2, delay=2, format="int4", **DILOCO), "normed"),
        (Local(8, fragments=2, delay=1, **DILOCO), "plain"),
    ],
    ids=lambda value: value.describe() if isinstance(value, Local) else value,
)
def test_members_hold_the_same_bits_after_a_synchronisation(pool: Pool, local: Local, model: str) -> None:
    case = Locally("three", ((1.0, 2.0, 1.0),), local=local, model=model, optimizer=Adam(name="adamw", clip_norm=0.5))
    results = pool.run(3, synchronise, case, 9, Ema(decay=0.9))
    first = results[0][0]
    assert all(report.gradient_norm is not None for report in results[1][1])
    common = [key for key in first if key.startswith("model/") or key.endswith(("outer_momentum", "average"))]
    assert any(key.endswith("average") for key in common)
    assert any(key.endswith("outer_momentum") for key in common)
    for state, reports, _ in results[1:]:
        for key in common:
            assert torch.equal(state[key], first[key]), key
        assert reports[-1].totals == results[0][1][-1].totals
    assert not all(torch.equal(results[1][0][key], first[key]) for key in first if "exp_avg" in key)


@pytest.mark.parametrize(
    ("local", "inner", "rate", "momentum"),
    [(Local(2, **DILOCO), PLAIN, 0.7, 0.9), (Local(2), Adam(name="adamw"), 1.0, 1 - 1 / math.sqrt(2))],
)
def test_the_outer_optimizer_is_nesterov_momentum_on_the_mean_of_the_changes(
    pool: Pool, local: Local, inner: Sgd | Adam, rate: float, momentum: float
) -> None:
    case = two(local, optimizer=inner)
    results = pool.run(2, synchronise, case, 4)
    replicas = [model_of(case).stage(0, len(model_of(case).chain)).train() for _ in range(2)]
    optimizers = [torchs(inner, list(stage.parameters()), LR) for stage in replicas]

    def alone(outer: dict[str, Tensor], place: int, steps: range) -> dict[str, Tensor]:
        stage, optimizer = replicas[place], optimizers[place]
        stage.load_state_dict(outer)
        for step in steps:
            batch = RandomBatch(step)
            start, stop = case.plan(len(model_of(case).chain)).stages[0].parts(batch.size, step)[place]
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(stage(batch.inputs(start, stop)), batch.targets(start, stop))
            loss.backward()
            optimizer.step()
        return {name: value.detach().clone() for name, value in stage.state_dict().items()}

    outer = {
        name: value.clone() for name, value in model_of(case).stage(0, len(model_of(case).chain)).state_dict().items()
    }
    master = [torch.nn.Parameter(value.clone()) for value in outer.values()]
    optimizer = torch.optim.SGD(master, lr=rate, momentum=momentum, nesterov=True)
    for steps in (range(2), range(2, 4)):
        sizes = [
            [
                case.plan(len(model_of(case).chain)).stages[0].parts(RandomBatch(step).size, step)[place]
                for step in steps
            ]
            for place in range(2)
        ]
        rows = [sum(stop - start for start, stop in parts) for parts in sizes]
        moved = [alone(outer, place, steps) for place in range(2)]
        for parameter, name in zip(master, outer, strict=True):
            changes = [outer[name] - one[name] for one in moved]
            parameter.grad = sum(c * n / sum(rows) for c, n in zip(changes, rows, strict=True))
        optimizer.step()
        outer = {name: value.detach().clone() for name, value in zip(outer, master, strict=True)}
    for state, _, _ in results:
        for name, value in outer.items():
            assert distance(state[f"model/{name}"], value) < 1e-5, name


@pytest.mark.parametrize("members", [((1.0, 1.0),), ((1.0, 1.0), (1.0, 1.0))], ids=["ddp", "replicas"])
def test_nothing_travels_between_replicas_until_they_synchronise(
    pool: Pool, members: tuple[tuple[float, ...], ...]
) -> None:
    case = Locally("local", members, 2, local=Local(4))
    for _, reports, sent in pool.run(case.world_size, synchronise, case, 12):
        quiet = [amount for step, amount in enumerate(sent) if (step + 1) % 4]
        assert quiet == [(0, 0)] * 9  # not even totals: `sent` has what leaves a replica
        assert all(sent[step][0] > 0 for step in (3, 7, 11))
        assert [report.traffic["members"][0] > 0 for report in reports] == [(step + 1) % 4 == 0 for step in range(12)]


def test_slow_devices_take_fewer_local_steps(pool: Pool) -> None:
    case = Locally("unequal", ((1.0, 3.0),), local=Local(8))
    slow, fast = ([report.local_steps for report in reports] for _, reports, _ in pool.run(2, synchronise, case, 8))
    assert (sum(slow), sum(fast)) == (4, 12)


def diverging(rank: int, world_size: int, store: Store, case: Locally, broken: int, at: int) -> tuple[str, bool, int]:
    """Train with a learning rate beyond all bounds on one rank in one step; return what became of it."""
    model = model_of(case)
    group = Group(store, rank, world_size, 30.0)
    session = session_for(case.plan(len(model.chain)), model, group, PLAIN, FULL)
    error, kept = "", state_of(session)
    try:
        for step in range(9):
            if step == 4:
                kept = state_of(session)
            session.step(RandomBatch(step), math.inf if (rank, step) == (broken, at) else LR)
    except (Diverged, PeerLost) as found:
        error = f"{type(found).__name__}: {found}"
    session.close()
    group.close()
    state = session.state.tensors()
    return (
        error,
        all(torch.equal(state[key], value) for key, value in kept.items() if "model/" in key),
        session.state.step,
    )


def test_a_replica_that_diverges_is_named_and_nobody_keeps_its_parameters(pool: Pool) -> None:
    case = Locally("three", ((1.0,) * 3,), local=Local(4))
    told = pool.run(3, diverging, case, 1, 5)
    assert told[1][0].startswith("Diverged: step 6: the loss is nan (rank 1). Parameters are as they were after step 4")
    assert [error.partition(":")[0] for error, _, _ in told] == ["PeerLost", "Diverged", "PeerLost"]
    assert [(same, step) for _, same, step in told] == [(True, 4)] * 3


def test_an_outer_gradient_that_is_not_finite_is_refused_on_all_ranks(pool: Pool) -> None:
    for local in (Local(4), Local(4, format="int4"), Local(4, format="topk")):
        for error, same, step in pool.run(2, diverging, two(local), 1, 7):
            assert error.startswith("Diverged: step 8: the outer gradient is not finite (the parameters or the loss of")
            assert "of rank 1 are not). Parameters are as they were after step 4" in error
            assert (same, step) == (True, 4)


def interrupted(
    rank: int, world_size: int, store: Store, case: Locally, steps: list[int], lost: set[int], after: list[float]
) -> tuple[int, dict[str, Tensor]]:
    """Take so many steps on each rank, lose some ranks, and go on to the next synchronisation without them.

    `after` are the shares that the ranks have then. Return the first step in the new group, and the state at its end.
    """
    model = model_of(case)
    group = Group(PrefixStore("first", store), rank, world_size, 30.0)
    session = session_for(case.plan(len(model.chain)), model, group, PLAIN, FULL)
    for step in range(steps[rank]):
        if step < 7:
            session.step(RandomBatch(step), LR)
        else:  # which ends with a synchronisation, in which a lost rank is missing
            with pytest.raises(PeerLost):
                session.step(RandomBatch(step), LR)
            group.abort()  # as a rank does that has lost a peer, so that all of them know
    if rank not in lost:
        store.set(f"ready/{rank}", "")
        store.wait([f"ready/{other}" for other in range(world_size) if other not in lost])
    session.close()
    group.close()
    state = session.state
    assert state.step == 4
    if rank in lost:
        return 0, {}
    ranks = [one for one in range(world_size) if one not in lost]
    group = Group(PrefixStore("second", store), ranks.index(rank), len(ranks), 30.0)
    found = agreed_state(state, True, group)
    assert found is not None
    assert found.step == 4
    stages = len(case.members)
    plan = replace(case, members=(tuple(after),) * stages).plan(len(model.chain))
    again = open_session(plan, state, group, Classification(), FULL)
    again.begin()
    first = state.step
    for step in range(first, 8):
        again.step(RandomBatch(step), LR)
    tensors = state_of(again)
    again.close()
    group.close()
    return first, tensors


def worked(case: Locally, start: dict[str, Tensor], rows: Sequence[tuple[int, tuple[int, int]]]) -> dict[str, Tensor]:
    """The parameters of a replica after these rows of these batches, one after another."""
    stage = model_of(case).stage(0, len(model_of(case).chain)).train()
    stage.load_state_dict({name: start[f"model/{name}"] for name in stage.state_dict()})
    optimizer = torch.optim.SGD(stage.parameters(), lr=LR, weight_decay=1e-3)
    for step, (first, end) in rows:
        optimizer.zero_grad()
        inputs, targets = RandomBatch(step).inputs(first, end), RandomBatch(step).targets(first, end)
        torch.nn.functional.cross_entropy(stage(inputs), targets).backward()
        optimizer.step()
    return {f"model/{name}": value.detach().clone() for name, value in stage.state_dict().items()}


@pytest.mark.parametrize(
    ("steps", "first"),
    [([6, 6, 6, 7], 6), ([7, 6, 6, 5], 6), ([8, 8, 8, 6], 7)],
    ids=["equally far", "differently far", "in the synchronisation"],
)
def test_a_lost_replica_costs_the_others_no_step(pool: Pool, steps: list[int], first: int) -> None:
    case = Locally("four", ((1.0,) * 4,), local=Local(4))
    kept = [found for found in pool.run(4, interrupted, case, steps, {3}, [1.0] * 3) if found[1]]
    assert [found for found, _ in kept] == [first] * 3
    agreed = pool.run(4, synchronise, replace(case, optimizer=PLAIN), 4)[0][0]
    before, after = (Stage(0, 1, tuple(range(count)), (1.0,) * count) for count in (4, 3))
    moved, total = [], 0
    for rank in range(3):
        plans = [(step, before if step < steps[rank] else after) for step in range(4, 8)]
        rows = [(step, stage.parts(RandomBatch(step).size, step)[rank]) for step, stage in plans]
        count = sum(end - first for _, (first, end) in rows)
        moved.append((count, worked(case, agreed, rows)))
        total += count
    for _, state in kept:
        for name in moved[0][1]:
            expected = torch.stack([count / total * own[name] for count, own in moved]).sum(0)
            assert distance(state[name], expected) < 1e-5, name


def test_a_replica_that_is_a_pipeline_goes_on_as_a_whole(pool: Pool) -> None:
    case = Locally("four", ((1.0, 1.0), (1.0, 1.0)), 2, local=Local(4))
    kept = pool.run(4, interrupted, case, [6] * 4, set(), [1.0, 1.0])
    assert [first for first, _ in kept] == [6] * 4
    whole = pool.run(4, synchronise, replace(case, optimizer=PLAIN), 8)
    for (_, state), (expected, _, _) in zip(kept, whole, strict=True):
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def broken(rank: int, world_size: int, store: Store, case: Locally, at: int) -> dict[str, Tensor]:
    """Train nine steps in two groups of the same ranks, the first of which breaks after `at` steps."""
    session = None
    model = model_of(case)
    state = TrainState(model, case.optimizer, None, True)
    for name, until in (("first", at), ("second", 9)):
        group = Group(PrefixStore(name, store), rank, world_size, 30.0)
        if session is not None:
            assert agreed_state(state, True, group) is not None
        session = open_session(case.plan(len(model.chain)), state, group, Classification(), FULL)
        session.begin()
        for step in range(state.step, until):
            session.step(RandomBatch(step), LR, Wishes(full=step == 8))
        tensors = state_of(session)
        session.close()
        group.close()
    return tensors


@pytest.mark.parametrize(
    ("local", "at"), [(Local(4), 6), (Local(4, fragments=2), 2), (Local(4, fragments=2), 7), (Local(4, delay=2), 6)]
)
def test_a_group_that_breaks_without_a_loss_changes_nothing(pool: Pool, local: Local, at: int) -> None:
    case = Locally("three", ((1.0,) * 3,), local=local, optimizer=PLAIN)
    straight = pool.run(3, synchronise, case, 9)
    for state, (expected, _, _) in zip(pool.run(3, broken, case, at), straight, strict=True):
        assert state.keys() == expected.keys()
        for name, value in state.items():
            assert distance(value, expected[name]) < 1e-6, name


def kept(done: int, place: int, before: bool = True) -> Kept:
    """What a rank of a pipeline of two says that it has, in a replica of this number."""
    return Kept(before, done, (place, 2), (1.0,))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([kept(7, 0), kept(7, 0)], 7),
        ([kept(7, 0), kept(6, 0)], 4),  # they have come differently far, so both repeat their steps
        ([kept(7, 0), kept(7, 1)], None),  # both have lost the rest of their replica
        ([kept(7, 0), Kept(False, 4, (), ())], None),
        ([kept(7, 0), Kept(True, 4, (), ())], 4),  # other layers than before
        ([Kept(False, 4, (), ())] * 2, None),
    ],
)
def test_replicas_go_on_only_as_a_whole(ranks: list[Kept], expected: int | None) -> None:
    assert done_by(ranks, 4) == expected


def unsure(
    rank: int, world_size: int, store: Store, case: Locally, last: float = LR
) -> tuple[int, int | None, dict[str, Tensor]]:
    """Lose the consent of the others to a synchronisation on all ranks but the first; then settle what counts.

    `last` is the learning rate of the last step on the last rank.
    """
    model = model_of(case)
    group = Group(PrefixStore("first", store), rank, world_size, 30.0)
    session = session_for(case.plan(len(model.chain)), model, group, PLAIN, FULL)
    assert isinstance(session, LocalSession)
    for step in range(7):
        session.step(RandomBatch(step), LR)
    agree = session._totals.agree

    def lose(*arguments: Any, **others: Any) -> Any:
        totals = agree(*arguments, **others)
        if rank:
            raise PeerLost("lost after everything else has arrived")
        return totals

    session._totals.agree = lose  # type: ignore[method-assign]
    with contextlib.suppress(PeerLost, Diverged):
        session.step(RandomBatch(7), last if rank == world_size - 1 else LR)
    session.close()
    group.close()
    state = session.state
    before = state.step, state.next
    group = Group(PrefixStore("second", store), rank, world_size, 30.0)
    assert agreed_state(state, True, group) is not None
    group.close()
    return *before, {key: value.clone() for key, value in state.tensors().items()}


def test_who_lacks_only_the_others_consent_takes_a_synchronisation_over(pool: Pool) -> None:
    first, *others = pool.run(3, unsure, Locally("three", ((1.0,) * 3,), local=Local(4)))
    assert first[:2] == (8, None)
    for step, following, tensors in others:
        assert (step, following) == (4, 8)
        assert tensors.keys() == first[2].keys()
        assert all(torch.equal(value, first[2][key]) for key, value in tensors.items())


def test_nobody_may_go_on_from_a_synchronisation_that_is_not_finite(pool: Pool) -> None:
    for step, following, tensors in pool.run(3, unsure, Locally("three", ((1.0,) * 3,), local=Local(4)), math.inf):
        assert (step, following) == (4, None)
        assert all(bool(torch.isfinite(value).all()) for key, value in tensors.items() if key.startswith("model/"))


def first_fragment(rank: int, world_size: int, store: Store, case: Locally, stop: bool) -> dict[str, Tensor]:
    """Train until the first of two fragments is synchronised; return its parameters and its momentum."""
    model = model_of(case)
    group = Group(store, rank, world_size, 30.0)
    session = session_for(case.plan(len(model.chain)), model, group, PLAIN, FULL)
    assert isinstance(session, LocalSession)
    for step in range(2):
        session.step(RandomBatch(step), LR, Wishes(stop=stop))
    names = [name for fragment in session._fragments[0] for name in fragment._parameters]
    state = state_of(session)
    session.close()
    group.close()
    return {key: value for key, value in state.items() if any(f"/{name}" in key for name in names)}


def test_a_stop_does_not_move_what_has_just_been_synchronised(pool: Pool) -> None:
    case = two(Local(4, fragments=2, **DILOCO))
    on, stopped = (pool.run(2, first_fragment, case, stop)[0] for stop in (False, True))
    assert any(key.endswith("outer_momentum") for key in on)
    for key, value in on.items():
        assert torch.equal(stopped[key], value), key


def stopping(rank: int, world_size: int, store: Store, case: Locally, at: int) -> list[tuple[bool, float]]:
    """Ask for the end on one rank; return whether each step says so."""
    model, group = model_of(case), Group(store, rank, world_size, 30.0)
    session = session_for(case.plan(len(model.chain)), model, group, PLAIN, FULL)
    told = []
    for step in range(8):
        totals = session.step(RandomBatch(step), LR, Wishes(stop=rank == 1 and step == at)).totals
        told.append((totals.stop, totals.loss))
    held_out = session.evaluate([RandomBatch(step) for step in (2, 3)])
    session.close()
    group.close()
    return [*told, (False, held_out.loss)]


def test_a_wish_to_stop_is_known_to_all_at_the_next_synchronisation(pool: Pool) -> None:
    for local, heard in ((Local(4), 3), (Local(6, fragments=3), 1)):
        told = pool.run(2, stopping, two(local), 0)
        assert [stop for stop, _ in told[0]] == [step == heard for step in range(8)] + [False]
        assert [stop for stop, _ in told[1]] == [stop for stop, _ in told[0]]
        assert told[0][heard] == told[1][heard]  # the mean loss of all replicas
        assert told[0][-1] == told[1][-1]
