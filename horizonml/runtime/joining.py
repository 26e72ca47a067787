"""Decides which newcomers follow the others until their state has arrived, and tells how that went."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from horizonml.comm.expected import fields, number, whole
from horizonml.comm.group import Group
from horizonml.engine.session import Trainer
from horizonml.machine.accelerator import computing
from horizonml.machine.resources import memory_left
from horizonml.plan.plan import Plan
from horizonml.state.follow import Following, Needs, followers, needs
from horizonml.state.move import Moves
from horizonml.state.resume import Recovery
from horizonml.state.train_state import TrainState
from horizonml.telemetry.recorder import Recorder
from horizonml.text import count, human_bytes

_SHARE = 0.5  # of the memory that is left on a rank; activations and gradients take the rest
_PIECE_BYTES = 1 << 20  # by which the speed of a newcomer's link is measured
_LONG_SECONDS = 0.3  # of waiting, for which following, which itself takes some time to set up, is worthwhile
_LEAST_STEPS = 4  # for whose gradients there must be room, or following would not be worthwhile


@dataclass(frozen=True)
class Place:
    """Describes the group in which a rank recovers."""

    group: Group
    started_as: list[int]  # the rank that each member was started as
    say: Callable[[str], None]  # tells the user, on rank 0


def _room(group: Group) -> float:
    """Return the bytes that following may take on this rank."""
    left, compute = memory_left(processes=group.hosts.count(group.hosts[group.rank])), computing()
    there, taken = compute.memory(), compute.taken()
    return _SHARE * (left if there is None or taken is None else min(left, there - taken))


def who_follows(state: TrainState, moves: Moves, found: Recovery, plan: Plan, place: Place) -> frozenset[int]:
    """Return the ranks that follow the others by a plan, instead of receiving their layers before training goes on.

    All ranks of the group call this. Raises PeerLost.
    """
    group = place.group
    present = frozenset(rank for layer in state.stateful() for rank in found.holders[layer])
    chosen = followers(moves, present, plan)
    if chosen:
        chosen = _slow(chosen, moves, state, plan, group)
    if not chosen:
        return chosen
    told = group.gather_json([_room(group), _wanted(needs(state, plan, chosen, group.rank))], fields(number, whole()))
    for rank, (room, wanted) in enumerate(told):
        if wanted > room:
            place.say(
                f"all ranks wait while newcomers receive their state: going on meanwhile would take "
                f"{human_bytes(wanted)} of memory on rank {rank}, which can spare {human_bytes(room)}"
            )
            return frozenset()
    return chosen


def _slow(chosen: frozenset[int], moves: Moves, state: TrainState, plan: Plan, group: Group) -> frozenset[int]:
    """Return those of the ranks whose state takes long to arrive; for others it is quicker if all wait for it.

    Each asks one of its senders for a piece, and tells how long all of its state would take. Raises PeerLost.
    """
    tag, seconds = group.channel("probe").tag(), 0.0
    first = {receiver: sender for _, sender, receiver in reversed(moves) if receiver in chosen}
    for receiver, sender in sorted(first.items()):
        word, piece = torch.zeros(1, dtype=torch.uint8), torch.zeros(_PIECE_BYTES, dtype=torch.uint8)
        if group.rank == sender:
            group.wait(group.receive(word, receiver, tag), receiver)
            group.wait(group.send(piece, receiver, tag), receiver)
        elif group.rank == receiver:
            began = time.monotonic()
            arrives = group.receive(piece, sender, tag)
            group.wait(group.send(word, sender, tag), sender)
            group.wait(arrives, sender)
            taken = time.monotonic() - began
            seconds = taken * needs(state, plan, chosen, receiver).copies / _PIECE_BYTES
    told = group.gather_json(seconds, number)
    return frozenset(rank for rank in chosen if told[rank] > _LONG_SECONDS)


def _wanted(needed: Needs) -> int:
    return needed.copies + _LEAST_STEPS * needed.gradients


def follow(session: Trainer, ranks: frozenset[int]) -> None:
    """Begin to bring some ranks of a session their state; all ranks of the group call this. Raises PeerLost."""
    state, plan, group = session.state, session.plan, session.group
    room = _room(group) - needs(state, plan, ranks, group.rank).copies
    following = Following(state, plan, group, ranks, room)
    session.follow(following)
    following.start()


def tell(following: Following, group: Group, recorder: Recorder, step: int) -> None:
    """Tell the user who has caught up after a step; all ranks of the group call this. Raises PeerLost."""
    received = group.gather_json([following.early, following.waited], fields(whole(), whole()))
    for rank in sorted(following.ranks):
        early, late = received[rank]
        waited = f", and {human_bytes(late)} while they waited" if late else ""
        recorder.message(
            f"rank {rank} joined at step {step}; {human_bytes(early)} of state arrived while the others trained, in "
            f"{count(following.steps, 'step')}{waited}"
        )
    if group.rank in following.ranks:
        recorder.followed(step, following.steps, following.early)
