"""Where the members of a stage split channels, no step is lost with a member, nor with its group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.engine.verdict import Verdict
from horizonml.errors import PeerLost
from horizonml.machine.signals import StopRequest
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.runtime.life import Last, Life
from horizonml.runtime.restore import crowded, recover
from horizonml.state.carry import hand_over
from horizonml.state.mirror import Mirror, Rebuild, Report, buddies, keepers, owners, rebuilds
from horizonml.state.parts import TensorSplit, joined
from horizonml.state.runfolder import RunFolder
from horizonml.tasks.task import Batch
from horizonml.telemetry.lifeline import Lifeline
from horizonml.telemetry.metrics import Metrics
from horizonml.telemetry.record import StateSource
from horizonml.telemetry.sinks import Feeds
from tests.distributed.pool import Pool
from tests.distributed.sessions import agreed_state, copies_in, state_of
from tests.distributed.test_lossless import CLIP_NORM, LAYERS, LR, Batches, described, fresh, job, session_on

FAST, SLOW = 1e9, 6_000.0  # bytes per second: a copy with every step, or one in several
STEPS, TOTAL = 8, 10  # until the loss, and in all


def split(*shares: float, micro_batches: int = 1) -> Plan:
    return Plan((Stage(0, LAYERS, tuple(range(len(shares))), shares, Sync.CHANNELS),), micro_batches=micro_batches)


@dataclass(frozen=True)
class Scene:
    """What happens to a group."""

    plan: Plan
    after: Plan  # by which the ranks that are left go on
    lost: tuple[int, ...] = ()
    steps: int = STEPS
    bytes_per_second: float = FAST
    behind: int | None = None  # the rank that misses the agreement on the last step
    handed_over: bool = False  # to rank 0 alone: the group breaks before the others have their layers
    leaves: bool = False  # whether those that are `lost` hand over what they have
    clip_norm: float | None = None
    mirrors: int = 1


@dataclass(frozen=True)
class End:
    """What a rank has in the end."""

    state: dict[str, Tensor]
    said: list[str]
    source: StateSource | None = None
    step: int | None = None  # at which the ranks that are left go on
    kept: int = 0  # copies of its own parts when the group broke


def miss_the_agreement(session: Session, batch: Batch) -> None:
    """Do all work of a step, and lose the others before it is known that all have."""
    agree = session._check.after_sums

    def once_more() -> Verdict:
        agree()
        raise PeerLost("a peer closed its connection")

    session._check.after_sums = once_more  # type: ignore[method-assign]
    with pytest.raises(PeerLost):
        session.step(batch, LR)


def train(rank: int, world_size: int, store: Store, folder: str, scene: Scene) -> End:
    """Train with a mirror; then the group breaks, and the ranks that are left go on to `TOTAL`."""
    torch.set_num_threads(1)
    batches, state = Batches(), fresh("", scene.clip_norm)
    group = Group(PrefixStore("all", store), rank, world_size, 30.0)
    session = session_on(scene.plan, state, group)
    mirror = Mirror(scene.plan, state, group, lambda _: scene.bytes_per_second, 1.0, 1 << 30, scene.mirrors)
    for step in range(scene.steps):
        mirror.before_step(1.0)
        last = step == scene.steps - 1
        if last and rank == scene.behind:
            miss_the_agreement(session, batches[step])
            assert state.prepared is not None
        else:
            session.step(batches[step], LR)
        mirror.after_step()
    if scene.behind is not None and rank != scene.behind:
        mirror.before_step(1.0)  # they have begun the next step when the group breaks
    store.set(f"broken/{rank}", "")
    store.wait([f"broken/{other}" for other in range(world_size)])
    session.close()
    if scene.leaves:
        hand_over(state, scene.plan, group, leaves=rank in scene.lost)
    if scene.handed_over:
        whole = state.whole(group, 0, LAYERS)
        if rank == 0:
            state.become(whole)
    group.close()
    if rank in scene.lost:
        return End({}, [])
    return go_on(rank, world_size, store, Path(folder), scene, Last(1, list(range(world_size)), mirror))


def go_on(rank: int, world_size: int, store: Store, folder: Path, scene: Scene, last: Last) -> End:
    """Meet the others that are left, recover, and train on."""
    state, said, batches = last.mirror._state, list[str](), Batches()
    kept = len(last.mirror.replicas.get(rank, []))
    members = [other for other in range(world_size) if other not in scene.lost]
    group = Group(PrefixStore("left", store), members.index(rank), len(members), 30.0, started_as=members)
    place = RunFolder(folder / str(rank), rank, "test", False)
    about, lifeline = job("", scene.clip_norm), Lifeline(folder, rank)
    feeds = Feeds(about.telemetry, folder)
    life = Life(about, rank, world_size, Metrics(rank), StopRequest(), place, False, lifeline, feeds)
    life.state, life.last = state, last
    found = agreed_state(state, True, group)
    assert found is not None
    if set(last.members) <= set(members):
        last.mirror.keep_parts(state)
    copies = copies_in(group, last)
    source, _ = recover(life, described(), found, scene.after, group, copies, said.append)
    step = state.step
    if source is None:
        group.close()
        return End({}, said)
    session = session_on(scene.after, state, group)
    for number in range(step, TOTAL):
        session.step(batches[number], LR)
    end = End(state_of(session), said, source, step, kept)
    session.close()
    group.close()
    return end


def straight(
    rank: int, world_size: int, store: Store, plan: Plan, total: int, clip_norm: float | None = None
) -> dict[str, Tensor]:
    """Train without a fault."""
    torch.set_num_threads(1)
    batches, state = Batches(), fresh("", clip_norm)
    group = Group(store, rank, world_size, 30.0)
    session = session_on(plan, state, group)
    for step in range(total):
        session.step(batches[step], LR)
    found = state_of(session)
    session.close()
    group.close()
    return found


_undisturbed: dict[tuple[Plan, float | None], dict[str, Tensor]] = {}


def undisturbed(pool: Pool, plan: Plan, clip_norm: float | None = None) -> dict[str, Tensor]:
    """What a training without a fault ends with; it is run once for all tests."""
    if (plan, clip_norm) not in _undisturbed:
        _undisturbed[plan, clip_norm] = pool.run(plan.world_size, straight, plan, TOTAL, clip_norm)[0]
    return _undisturbed[plan, clip_norm]


def expect_nothing_lost(pool: Pool, folder: Path, scene: Scene, source: StateSource) -> list[End]:
    world_size = scene.plan.world_size
    ends = pool.run(world_size, train, str(folder), scene)
    expected = undisturbed(pool, scene.plan, scene.clip_norm)
    left = [end for rank, end in enumerate(ends) if rank not in scene.lost]
    for end in left:
        assert (end.source, end.step, end.said) == (source, scene.steps, [])
        assert end.state.keys() == expected.keys()
        assert any(key.startswith("optimizer/") for key in end.state)
        for key, value in end.state.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5)
    return left


def test_what_a_lost_member_held_is_rebuilt(pool: Pool, tmp_path: Path) -> None:
    scene = Scene(split(1.0, 2.0, 1.0), split(1.0, 1.0), (0,), bytes_per_second=SLOW)
    expect_nothing_lost(pool, tmp_path, scene, StateSource.REPLICA)


def test_steps_whose_gradients_were_clipped_are_repeated_alike(pool: Pool, tmp_path: Path) -> None:
    plan, after = split(1.0, 2.0, 1.0), split(1.0, 1.0)
    scene = Scene(plan, after, (1,), bytes_per_second=SLOW, behind=2, clip_norm=CLIP_NORM)
    (first, _) = expect_nothing_lost(pool, tmp_path, scene, StateSource.REPLICA)
    assert any(key.endswith("/average") for key in first.state)


def test_the_others_go_on_by_any_plan(pool: Pool, tmp_path: Path) -> None:
    # BatchNorm sees micro-batches, so the reference has those of `plan` all the way; the step count must agree.
    plan = split(1.0, 1.0, 1.0, micro_batches=2)
    after = Plan((Stage(0, 6, (0,), (1.0,)), Stage(6, LAYERS, (1,), (1.0,))), micro_batches=2)
    ends = pool.run(plan.world_size, train, str(tmp_path), Scene(plan, after, (1,), steps=TOTAL))
    expected = undisturbed(pool, plan)
    found = {key: value for rank, end in enumerate(ends) if rank != 1 for key, value in end.state.items()}
    assert found.keys() == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5)


def test_before_the_first_copy_parts_are_rebuilt_from_their_initial_values(pool: Pool, tmp_path: Path) -> None:
    scene = Scene(split(1.0, 2.0, 1.0), split(1.0, 1.0), (2,), steps=2)
    expect_nothing_lost(pool, tmp_path, scene, StateSource.REPLICA)


@pytest.mark.parametrize(("behind", "lost"), [(0, ()), (2, (1,))], ids=["rank 0", "rank 2, and another is lost"])
def test_members_that_are_a_step_apart_do_not_mix_steps(
    pool: Pool, tmp_path: Path, behind: int, lost: tuple[int, ...]
) -> None:
    plan = split(1.0, 1.0, 1.0)
    scene = Scene(plan, split(1.0, 1.0) if lost else plan, lost, behind=behind)
    ends = expect_nothing_lost(pool, tmp_path, scene, StateSource.REPLICA)
    assert [end.kept for end in ends] == [2] * len(ends)  # the newest copy, and one that all know to be complete
    if not lost:  # whose parts are all there
        expected = undisturbed(pool, plan)
        assert all(torch.equal(ends[0].state[key], expected[key]) for key in expected)


def test_a_member_that_leaves_takes_no_step_with_it(pool: Pool, tmp_path: Path) -> None:
    # Copies are never taken, and no checkpoint is there.
    scene = Scene(split(1.0, 2.0, 1.0), split(1.0, 1.0), (1,), bytes_per_second=1.0, leaves=True)
    expect_nothing_lost(pool, tmp_path, scene, StateSource.MEMORY)


def test_the_layers_of_one_member_suffice_when_the_group_breaks_as_they_are_made_whole(
    pool: Pool, tmp_path: Path
) -> None:
    scene = Scene(split(1.0, 2.0, 1.0), split(1.0, 1.0), (2,), bytes_per_second=1.0, handed_over=True)
    expect_nothing_lost(pool, tmp_path, scene, StateSource.MEMORY)


def test_two_members_at_once_are_rebuilt_where_there_are_two_copies(pool: Pool, tmp_path: Path) -> None:
    scene = Scene(split(1.0, 2.0, 1.0, 1.0), split(1.0, 1.0), (1, 2), bytes_per_second=SLOW, mirrors=2)
    expect_nothing_lost(pool, tmp_path, scene, StateSource.REPLICA)


def test_without_a_copy_the_state_is_not_complete(pool: Pool, tmp_path: Path) -> None:
    scene = Scene(split(1.0, 1.0, 1.0), Plan((Stage(0, LAYERS, (0,), (1.0,)),)), (1, 2))
    end = pool.run(3, train, str(tmp_path), scene)[0]
    assert end.source is None
    assert "lost together" in " ".join(end.said)


def test_members_keep_copies_for_each_other_on_another_machine() -> None:
    plan = split(1.0, 1.0, 1.0, 1.0)
    assert owners(plan) == dict.fromkeys(range(4), 1)
    assert buddies(plan) == {0: (1,), 1: (2,), 2: (3,), 3: (0,)}
    assert buddies(plan, 1, ["a", "a", "b", "b"]) == {0: (2,), 1: (2,), 2: (0,), 3: (0,)}
    assert keepers(plan, 1) == set()
    assert owners(split(1.0)) == {}
    assert buddies(plan, 2, ["a", "a", "b", "b"]) == {0: (2, 1), 1: (2, 3), 2: (0, 3), 3: (0, 1)}
    assert buddies(plan, 2, [*"abcd"]) == {0: (1, 2), 1: (2, 3), 2: (3, 0), 3: (0, 1)}


def test_the_copies_of_one_step_are_taken() -> None:
    plan = split(1.0, 1.0, 1.0)

    ahead, behind = Report({0: [7, 8], 2: [7, 8]}, None), Report({1: [6, 7], 0: [6, 7]}, None)
    assert rebuilds(plan, [3], {0: ahead, 1: behind}) == [Rebuild((0, 1, 2), (0, 1, 2), 7, 1, (1, 1, 0), ())]
    assert rebuilds(plan, [3], {0: ahead, 1: Report({1: [6]}, None)}) is None
    assert rebuilds(plan, [3], {0: ahead}) is None


def sizes(rank: int, world_size: int, store: Store, plan: Plan) -> tuple[int, int]:
    """Return the bytes that a copy of a member's parts is expected to have, and those that it has after a step."""
    torch.set_num_threads(1)
    state, group = fresh(), Group(store, rank, world_size, 30.0)
    session = session_on(plan, state, group)
    expected = state.bytes()
    session.step(Batches()[0], LR)
    found = sum(tensor.nbytes for tensor in state.tensors().values())
    session.close()
    group.close()
    return expected, found


def test_a_member_counts_the_bytes_of_its_parts(pool: Pool) -> None:
    (first, found_first), (second, found_second) = pool.run(2, sizes, split(1.0, 3.0))
    assert (first, second) == (found_first, found_second)
    assert first < second


def test_copies_of_parts_count_where_memory_is_short() -> None:
    plan = split(1.0, 1.0)
    # Each has three copies of its own parts, and three of the other's.
    assert crowded(plan, [10, 20], [181.0, 181.0]) is None
    assert crowded(plan, [10, 20], [181.0, 179.0]) == (1, 90)
    assert crowded(plan, [10, 20], [181.0, 181.0], ["a", "a"]) is None


def test_parts_that_do_not_fit_are_no_state() -> None:
    parts = {"a": TensorSplit(0, ((0, 1), (1, 3)), 0, (0, 1))}
    first, second = torch.zeros(1, 2), torch.ones(2, 2)
    whole = joined(parts, {0: {"model/a": first, "model/b": first}, 1: {"model/a": second}})
    assert torch.equal(whole["model/a"], torch.cat([first, second]))
    assert whole["model/b"] is first
    for damaged in ({}, {"model/a": torch.ones(2, 3)}):
        with pytest.raises(PeerLost, match="do not fit each other at model/a"):
            joined(parts, {0: {"model/a": first}, 1: damaged})
