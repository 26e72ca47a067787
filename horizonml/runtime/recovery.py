"""Brings the state in the ranks' memory to a new group and its plan, and prepares for the next loss."""

from __future__ import annotations

from collections.abc import Sequence

from horizonml.comm.expected import boolean, fields, number, whole
from horizonml.comm.group import Group
from horizonml.data.dataset import DataInfo
from horizonml.engine.session import Session
from horizonml.machine.resources import memory_left
from horizonml.plan.plan import Plan
from horizonml.profiling.probe import probe_network
from horizonml.runtime.agreement import Measured
from horizonml.runtime.joining import Place, who_follows
from horizonml.runtime.life import Life
from horizonml.runtime.rebuild import rebuild
from horizonml.state.mirror import Mirror
from horizonml.state.move import holders, move, senders
from horizonml.state.recover import Recovery
from horizonml.state.replicas import buddy, owners, together
from horizonml.state.train_state import TrainState
from horizonml.telemetry.record import Source
from horizonml.text import human_bytes

_ASSUMED_BANDWIDTH = 100e6  # bytes per second of a link that was not measured: about a gigabit
_MIRROR_SHARE = 0.5  # of the memory that is left when training begins; activations and gradients take the rest
_LOG_SHARE = 0.2  # likewise, for the messages that a rank keeps


def recover(
    life: Life, info: DataInfo, found: Recovery, plan: Plan, place: Place
) -> tuple[Source | None, frozenset[int]]:
    """Bring the state that ranks have in memory to a plan; all ranks of the group call this.

    Return where the state was taken from, or None if it is not complete, and the ranks that are to follow the others
    until they have it, too. Raises PeerLost.
    """
    state, source = life.state, Source.MEMORY
    assert state is not None
    if found.missing:
        rebuilt = rebuild(life.job, info, state, life.last, found, place.group, place.started_as)
        if isinstance(rebuilt, str):
            place.say(f"the state of step {found.step} cannot be completed without the lost ranks: {rebuilt}")
            state.drop()
            return None, frozenset()
        found, source = rebuilt, Source.REPLICA
    if state.parts:
        state.keep([])  # parts of a group that is over are no layers
    moves = senders(found.holders, plan)
    following = who_follows(state, moves, found, plan, place)
    move(state, [one for one in moves if one[2] not in following], place.group)
    if place.group.rank in following:
        state.drop()
    state.step, state.valid = found.step, place.group.rank not in following
    return source, following


def hand_over(state: TrainState, plan: Plan, group: Group, leaves: bool) -> None:
    """Bring the layers that only leaving ranks hold to ranks that stay, and make whole what the members had split.

    All ranks call this, without a session. Raises PeerLost.
    """
    told = group.gather_json([leaves, state.valid], fields(boolean, boolean))
    leaving = [rank for rank, (gone, _) in enumerate(told) if gone]
    staying = [rank for rank in range(group.world_size) if rank not in leaving]
    if not staying:
        return
    state.join(group)
    if not state.valid:  # this rank follows; whatever it is handed is valid, and all it has
        state.drop()
        state.valid = True
    plan = plan.without([rank for rank, (_, valid) in enumerate(told) if not valid])
    last = [(layer, ranks[0]) for layer, ranks in enumerate(holders(plan)) if all(rank in leaving for rank in ranks)]
    move(state, [(layer, rank, staying[n % len(staying)]) for n, (layer, rank) in enumerate(last)], group)


def known(life: Life, started_as: Sequence[int]) -> Measured | None:
    """Return what an earlier group has measured, if that includes all ranks of this one."""
    if life.measured is None or not set(started_as) <= set(life.measured_for):
        return None
    return life.measured.among([life.measured_for.index(rank) for rank in started_as])


def mirror_for(life: Life, session: Session, place: Place) -> Mirror | None:
    """Return what copies the state of ranks to each other's memory, if the plan needs that and there is room for it.

    All ranks of the group call this.
    """
    recovery, group, plan = life.job.recovery, session.group, session.plan
    group.log = None  # drops that of an earlier plan
    if not recovery.mirror or not owners(plan):
        return None
    left = memory_left(processes=group.hosts.count(group.hosts[group.rank]))
    size = session.state.bytes() if group.rank in owners(plan) else 0
    measured = known(life, place.started_as)
    spare = group.gather_json([size, left, measured is not None], fields(whole(), number, boolean))
    short = crowded(plan, [size for size, *_ in spare], [room for _, room, _ in spare], group.hosts)
    if short is not None:
        rank, needed = short
        place.say(
            f"warning: ranks keep no copies of each other's state: rank {rank} would need {human_bytes(needed)} "
            f"for them, with {human_bytes(spare[rank][1])} left. If a rank is lost that alone holds some "
            "state, all go on from a checkpoint (recovery.mirror: false turns copies and this warning off)"
        )
        return None
    assumed = _ASSUMED_BANDWIDTH
    if not all(knows for *_, knows in spare) and len(set(group.hosts)) > 1:
        # Copies that are sent too fast fill a slow link, and the messages of steps wait behind them.
        assumed = min(assumed, probe_network(group).bandwidth)

    def speed(to: int) -> float:
        return measured.network.between(group.rank, to).bandwidth if measured is not None else assumed

    log_bytes = min(recovery.log_bytes, int(left * _LOG_SHARE))
    return Mirror(plan, session.state, group, speed, recovery.mirror_budget, log_bytes)


def crowded(
    plan: Plan, state_bytes: Sequence[int], left: Sequence[float], hosts: Sequence[str] | None = None
) -> tuple[int, int] | None:
    """Return a rank that has too little memory for mirroring, and the bytes that it would need; None if there is none.

    An owner holds the copy that it sends. Its buddy holds the replica, and the next one, which is arriving. Where the
    members of a stage split channels, owner and buddy both hold one more, and the owner its replica, too.
    """
    buddies = {owner: buddy(plan, owner, hosts) for owner in owners(plan)}
    split = {owner for owner in buddies if len(together(plan, owner)) > 1}
    needed = [
        (3 if rank in split else 1) * state_bytes[rank]
        + sum((3 if owner in split else 2) * state_bytes[owner] for owner in buddies if buddies[owner] == rank)
        for rank in range(plan.world_size)
    ]
    worst = max(range(plan.world_size), key=lambda rank: needed[rank] / max(1.0, left[rank]))
    return (worst, needed[worst]) if needed[worst] > left[worst] * _MIRROR_SHARE else None
