"""A newcomer follows the others until their state has arrived, and then holds what they hold."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.errors import PeerLost
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.state.carry import hand_over, holders, move, senders
from horizonml.state.follow import Following, followers
from horizonml.state.spec import Adam, Ema, Sgd
from horizonml.state.train_state import TrainState
from horizonml.tasks.classification import Classification
from tests.distributed.pool import Pool
from tests.distributed.processes import wait_for
from tests.distributed.sessions import agreed_state, built, state_of
from tests.distributed.truth import FULL, LR, RandomBatch, expect_same

ONE, ROOM = (1.0,), 1e9
BEFORE, AFTER = 2, 2  # steps without the newcomer, and steps once it has caught up
State = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A plan for all ranks, of which one is new."""

    name: str
    plan: Plan
    newcomer: int
    model: str = "normed"
    optimizer: Sgd | Adam = field(default_factory=lambda: Sgd(momentum=0.9, weight_decay=1e-3))
    ema: Ema | None = None

    def state(self) -> TrainState:
        model = built(f"tests.models:{self.model}")
        return TrainState(model, self.optimizer, self.ema)

    def others(self) -> tuple[list[int], Plan]:
        """The ranks that are there before, and the plan by their numbers then."""
        old = [rank for rank in range(self.plan.world_size) if rank != self.newcomer]
        left = self.plan.without([self.newcomer])
        stages = tuple(
            Stage(s.start, s.stop, tuple(map(old.index, s.ranks)), s.shares, s.sync, s.send) for s in left.stages
        )
        return old, Plan(stages, left.schedule, left.micro_batches)


def ddp(layers: int, *shares: float, sync: Sync = Sync.ALL_REDUCE) -> Plan:
    return Plan((Stage(0, layers, tuple(range(len(shares))), shares, sync),), micro_batches=2)


HYBRID = Plan((Stage(0, 6, (0,), ONE), Stage(6, 15, (1, 2), (2.0, 1.0))), micro_batches=2)
CASES = [
    Case("ddp in buckets, adam, the first rank is new", ddp(6, 1.0, 2.0, 1.0), 0, "wide", Adam(name="adamw")),
    Case("ddp, sums of 16-bit floats", ddp(15, 1.0, 1.0, 1.0, sync=Sync.FP16), 1),
    Case("hybrid", HYBRID, 2),
    Case("hybrid, clipped and averaged", HYBRID, 1, optimizer=Sgd(momentum=0.9, clip_norm=0.5), ema=Ema(decay=0.9)),
]
DDP = Case("ddp", ddp(15, 1.0, 2.0, 1.0), 2)


def begin(case: Case, rank: int, store: Store) -> TrainState:
    """What a rank holds when the newcomer comes: some steps were made without it."""
    state = case.state()
    if rank != case.newcomer:
        old, plan = case.others()
        group = Group(PrefixStore("before", store), old.index(rank), len(old), 30.0)
        session = Session(plan, state, group, Classification(), FULL)
        for step in range(BEFORE):
            session.step(RandomBatch(step), LR)
        session.close()
        group.close()
    return state


def follow(
    case: Case, rank: int, world_size: int, store: Store, room: float = ROOM
) -> tuple[TrainState, Group, Session, Following]:
    """Begin to follow the others, or to be followed."""
    state = begin(case, rank, store)
    group = Group(PrefixStore("all", store), rank, world_size, 30.0)
    state.step, state.valid = BEFORE, rank != case.newcomer
    session = Session(case.plan, state, group, Classification(), FULL)
    following = Following(state, case.plan, group, frozenset({case.newcomer}), room)
    session.follow(following)
    return state, group, session, following


def step(session: Session, learning_rate: float = LR) -> bool:
    """One step as the training loop makes it; return whether any rank is behind."""
    if session.following is not None:
        session.following.before_step()
    return session.step(RandomBatch(session.state.step), learning_rate).totals.behind


def arrival(session: Session) -> None:
    """Wait until all state has gone or come."""
    following = session.following
    assert following is not None
    wait_for(lambda: following.arrived, "the state of the others", 30)


def joins(rank: int, world_size: int, store: Store, case: Case, steps: int, wait: bool) -> tuple[State, State, int]:
    """Follow for some steps; return what a rank holds when the newcomer has caught up, and in the end, and the steps.

    If all `wait`, it catches up between two steps, and else at the beginning of another one.
    """
    state, group, session, following = follow(case, rank, world_size, store)
    for _ in range(steps):
        assert step(session, 2 * LR)
        assert bool(state.layers()) == (rank != case.newcomer), "a state that is not complete is nobody's source"
    following.start()
    if wait:
        following.finish()
    else:
        arrival(session)
        assert not step(session)
    session.end_following()
    then, followed = state_of(session), following.steps
    assert state.layers()
    for _ in range(AFTER):
        assert not step(session)
    result = then, state_of(session), followed
    session.close()
    group.close()
    return result


def undisturbed(rank: int, world_size: int, store: Store, case: Case, followed: list[float]) -> State:
    """The same steps by the same shares, without any following: the newcomer gets its layers when it is to work."""
    state = begin(case, rank, store)
    old, plan = case.others()
    if rank != case.newcomer:
        group = Group(PrefixStore("meanwhile", store), old.index(rank), len(old), 30.0)
        session = Session(plan, state, group, Classification(), FULL)
        for rate in followed:
            step(session, rate)
        session.close()
        group.close()
    group = Group(PrefixStore("all", store), rank, world_size, 30.0)
    move(state, senders(holders(case.plan.without([case.newcomer])), case.plan), group)
    state.step = BEFORE + len(followed)
    session = Session(case.plan, state, group, Classification(), FULL)
    for _ in range(AFTER):
        step(session)
    found = state_of(session)
    session.close()
    group.close()
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_newcomer_that_has_followed_holds_what_the_others_hold_bit_for_bit(pool: Pool, case: Case) -> None:
    found = pool.run(3, joins, case, 3, False)
    other = next(
        rank for s in case.plan.stages if case.newcomer in s.ranks for rank in s.ranks if rank != case.newcomer
    )
    for part in (0, 1):
        new, old = found[case.newcomer][part], found[other][part]
        assert any(key.startswith("optimizer/") for key in new)
        expect_same(new, old)
    assert {followed for _, _, followed in found} == {4}
    expected = pool.run(3, undisturbed, case, [2 * LR] * 3 + [LR])
    tolerance = 1e-3 if case.plan.stages[0].sync is Sync.FP16 else 1e-5
    for (_, end, _), wanted in zip(found, expected, strict=True):
        assert end.keys() == wanted.keys()
        assert all(torch.allclose(end[key], wanted[key], atol=tolerance) for key in end)


def test_all_can_wait_for_a_newcomer_between_two_steps(pool: Pool) -> None:
    found = pool.run(3, joins, DDP, 3, True)
    assert {followed for _, _, followed in found} == {3}
    for part in (0, 1):
        new, old = found[2][part], found[0][part]
        expect_same(new, old)


def loses_a_sender(rank: int, world_size: int, store: Store) -> State | None:
    """Rank 0 is lost before it has sent its part of the state; rank 2 follows anew, and rank 1 sends everything."""
    state, group, session, following = follow(DDP, rank, world_size, store)
    if rank:
        following.start()
    for _ in range(2):
        step(session)
    assert not following.arrived or rank == 1
    if rank == 0:
        session.close()
        group.close()
        return None
    with pytest.raises(PeerLost):
        step(session)
    session.close()
    group.close()

    plan = ddp(15, 2.0, 1.0)
    group = Group(PrefixStore("left", store), rank - 1, 2, 30.0)
    found = agreed_state(state, True, group)
    assert found is not None
    assert found.step == BEFORE + 2
    assert {tuple(found.holders[layer]) for layer in set(state.model.parameter_names.values())} == {(0,)}
    assert rank == 1 or not state.tensors()
    state.step, state.valid = found.step, rank == 1
    session = Session(plan, state, group, Classification(), FULL)
    session.follow(Following(state, plan, group, frozenset({1}), ROOM))
    session.following.start()
    step(session)
    arrival(session)
    assert not step(session)
    session.end_following()
    step(session)
    result = state_of(session)
    session.close()
    group.close()
    return result


def test_a_newcomer_whose_sender_is_lost_follows_anew(pool: Pool) -> None:
    _, old, new = pool.run(3, loses_a_sender)
    expect_same(new, old)


def runs_short(rank: int, world_size: int, store: Store) -> tuple[list[bool], bool]:
    """Say after which steps a newcomer had no room left for more gradients."""
    size = sum(parameter.nbytes for parameter in DDP.state().model.stage(0, 15).parameters())
    state, group, session, following = follow(DDP, rank, world_size, store, 3.5 * size)
    hurries = [session.step(RandomBatch(state.step), LR).totals.hurry for _ in range(3)]
    following.start()
    following.finish()
    found = hurries, session.step(RandomBatch(state.step), LR).totals.behind
    session.close()
    group.close()
    return found


def test_a_newcomer_tells_in_time_that_it_has_no_room_for_more_gradients(pool: Pool) -> None:
    assert pool.run(3, runs_short) == [([False, False, True], False)] * 3


def everyone(*ranks: int) -> frozenset[int]:
    return frozenset(ranks)


def test_only_newcomers_follow_and_only_where_another_member_holds_their_stages() -> None:
    def following(held: dict[int, set[int]], plan: Plan) -> frozenset[int]:
        """The followers, where each layer is held by the ranks that hold any."""
        there = [[rank for rank, layers in held.items() if layer in layers] for layer in range(plan.layers)]
        return followers(senders(there, plan), frozenset(rank for rank, layers in held.items() if layers), plan)

    whole = set(range(15))
    three = ddp(15, 1.0, 1.0, 1.0)
    assert following({0: whole, 1: whole, 2: whole}, three) == everyone()
    assert following({0: whole, 2: whole}, three) == everyone(1)
    assert following({2: whole}, three) == everyone(0, 1)
    assert following({0: whole, 1: whole}, ddp(15, 1.0, 1.0, 1.0, sync=Sync.FP16)) == everyone(2)
    for sync in (Sync.POWERSGD, Sync.INT4, Sync.CHANNELS, Sync.HOROVOD):
        assert following({0: whole, 1: whole}, ddp(15, 1.0, 1.0, 1.0, sync=sync)) == everyone()
    # The layers of a stage that has no other member have to come first, as have those of a stage of newcomers only.
    assert following({1: whole}, Plan((Stage(0, 6, (0,), ONE), Stage(6, 15, (1,), ONE)))) == everyone()
    pairs = Plan((Stage(0, 6, (0, 1), (1.0, 1.0)), Stage(6, 15, (2, 3), (1.0, 1.0))))
    assert following({0: whole}, pairs) == everyone(1, 3)
    # Who holds other layers does not stand aside.
    assert following({0: set(range(6)), 1: set(range(6)), 2: set(range(6, 15))}, pairs) == everyone(3)
    assert following({0: set(range(6)), 1: set(range(6, 15)), 2: set(range(6, 15))}, pairs) == everyone(3)


def is_handed_over(rank: int, world_size: int, store: Store) -> State:
    """The ranks that hold the state leave while the newcomer follows; return what each of them holds then."""
    state, group, session, _ = follow(DDP, rank, world_size, store)
    for _ in range(2):
        step(session)
    session.close()
    hand_over(state, DDP.plan, group, leaves=rank != 2)
    group.close()
    if rank == 2:
        found = agreed_state(state, True, Group(None, 0, 1, 30.0))
        assert found is not None
        assert (found.step, found.missing) == (BEFORE + 2, [])
    return {key: value.clone() for key, value in state.tensors().items()}


def test_ranks_that_leave_hand_their_state_over_to_one_that_follows(pool: Pool) -> None:
    old, _, new = pool.run(3, is_handed_over)
    expect_same(new, old)
