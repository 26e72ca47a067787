"""Brings the state that ranks have in memory to a new group and its plan, and prepares for the next loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from horizonml.comm.group import Group
from horizonml.data.images import ImageInfo
from horizonml.engine.session import Session
from horizonml.plan.plan import Plan
from horizonml.runtime.agreement import Measured
from horizonml.runtime.life import Life
from horizonml.runtime.rebuild import rebuild
from horizonml.state.mirror import Mirror, owners
from horizonml.state.move import holders, move, senders
from horizonml.state.recover import Recovery
from horizonml.state.train_state import TrainState
from horizonml.telemetry.record import Source

_ASSUMED_BANDWIDTH = 100e6  # bytes per second of a link that was not measured: about a gigabit


@dataclass(frozen=True)
class Place:
    """Describes the group in which a rank recovers."""

    group: Group
    started_as: list[int]  # the rank that each member was started as
    say: Callable[[str], None]  # tells the user, on rank 0


def recover(life: Life, info: ImageInfo, found: Recovery, plan: Plan, place: Place) -> Source | None:
    """Bring the state that ranks have in memory to a plan; all ranks of the group call this.

    Return where the state was taken from, or None if it is not complete. Raises PeerLost.
    """
    state, source = life.state, Source.MEMORY
    assert state is not None
    if found.missing:
        rebuilt = rebuild(life.job, info, state, life.last, found, place.group, place.started_as)
        if isinstance(rebuilt, str):
            place.say(f"the state of step {found.step} cannot be completed without the lost ranks: {rebuilt}")
            state.keep([])
            return None
        found, source = rebuilt, Source.REPLICA
    move(state, senders(found.holders, plan), place.group)
    state.step = found.step
    return source


def hand_over(state: TrainState, plan: Plan, group: Group, leaves: bool) -> None:
    """Bring the layers that only leaving ranks hold to ranks that stay; all ranks call this. Raises PeerLost."""
    leaving = [rank for rank, gone in enumerate(group.gather_json(leaves)) if gone]
    staying = [rank for rank in range(group.world_size) if rank not in leaving]
    if not staying or any(stage.splits_channels for stage in plan.stages):
        return
    last = [(layer, ranks[0]) for layer, ranks in enumerate(holders(plan)) if all(rank in leaving for rank in ranks)]
    move(state, [(layer, rank, staying[n % len(staying)]) for n, (layer, rank) in enumerate(last)], group)


def known(life: Life, started_as: Sequence[int]) -> Measured | None:
    """Return what an earlier group has measured, if that includes all ranks of this one."""
    if life.measured is None or not set(started_as) <= set(life.measured_for):
        return None
    return life.measured.among([life.measured_for.index(rank) for rank in started_as])


def mirror_for(life: Life, session: Session, started_as: Sequence[int]) -> Mirror | None:
    """Return what copies the state of ranks to each other's memory, if the plan needs that."""
    recovery, rank = life.job.recovery, session.group.rank
    if not recovery.mirror or not owners(session.plan):
        return None
    measured = known(life, started_as)

    def speed(to: int) -> float:
        return measured.network.between(rank, to).bandwidth if measured is not None else _ASSUMED_BANDWIDTH

    return Mirror(session.plan, session.state, session.group, speed, recovery.mirror_budget, recovery.log_bytes)
