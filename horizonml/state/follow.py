"""Brings newcomers the state of their stages while the others train.

A newcomer is a member of the group from its first step on, as a follower: it works on no samples, and takes part in the
sums of gradients. Other members of its stages send it their state as it was when the group began, beside the training,
over connections of their own. The follower keeps the summed gradients until that state is complete, and then applies
them in order. As an update treats each element by itself, it now holds what the others hold, bit for bit, and all ranks
go on with the shares of the plan. Running statistics need nothing of this, for each step brings them to all members.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn

from horizonml.comm.expected import boolean, fields, number, whole
from horizonml.comm.group import Group
from horizonml.errors import PeerLost
from horizonml.machine.accelerator import computing
from horizonml.plan.plan import Plan
from horizonml.state.carry import Holders, Moves, Parcel, carry, holders, memory_here, parcels, senders
from horizonml.state.saver import Background
from horizonml.state.train_state import TrainState
from horizonml.text import human_bytes

_PIECE_BYTES = 256 << 10  # sent at a time, so that no message of a step waits long for one
_LEAST_PART = 0.25  # of the time in which pieces travel, however busy the link is
_LONGEST_REST = 0.5  # seconds between two pieces
_LOOK_SECONDS = 1.0  # between two looks at whether the state has arrived, when all ranks wait for it

_SHARE = 0.5  # of the memory that is left on a rank; activations and gradients take the rest
_TRIED_BYTES = 1 << 20  # by which the speed of a newcomer's link is measured
_LONG_SECONDS = 0.3  # of waiting, for which following, which itself takes some time to set up, is worthwhile
_LEAST_STEPS = 4  # for whose gradients there must be room, or following would not be worthwhile


def followers(held: Moves, present: frozenset[int], plan: Plan) -> frozenset[int]:
    """Return the ranks that can follow, of those that receive layers: `held` says which, and from whom.

    These are ranks that hold nothing (`present` are those that do) and whose stages all have another member that does
    not follow. Where all members of a stage are newcomers, the first one gets its layers before training goes on.
    """
    ways = {number: stage.sync.can_be_followed for number, stage in enumerate(plan.stages)}
    found = {
        rank
        for rank in {receiver for _, _, receiver in held} - present
        if all(ways[number] and len(plan.stages[number].ranks) > 1 for number in plan.stages_of(rank))
    }
    for stage in plan.stages:
        if found.issuperset(stage.ranks):
            found.discard(stage.ranks[0])
    return frozenset(found)


class FollowingMemory(NamedTuple):
    """Tells how many bytes of memory following takes on a rank."""

    copies: int  # of the state of layers, to send or on arrival
    gradients: int  # of one step, which only followers keep


def needs(state: TrainState, plan: Plan, following: frozenset[int], rank: int) -> FollowingMemory:
    """Return what following takes on a rank; any rank can tell that of each other."""
    moves = _moves(plan, following)
    layers = {layer for layer, sender, receiver in moves if rank in (sender, receiver)}
    tensors = (one for layer in layers for one in state.expected(layer).items())
    copies = sum(tensor.nbytes for key, tensor in tensors if not state.is_constant(key))
    kept = {layer for layer, _, receiver in moves if rank == receiver}
    shapes = state.model.parameter_shapes
    return FollowingMemory(copies, sum(4 * torch.Size(shape).numel() for layer in kept for shape in shapes[layer]))


def _moves(plan: Plan, following: frozenset[int]) -> Moves:
    return senders(holders(plan.without(following)), plan)


def room_for(group: Group) -> float:
    """Return the bytes that following may take on this rank."""
    left, compute = memory_here(group), computing()
    there, taken = compute.memory(), compute.taken()
    return _SHARE * (left if there is None or taken is None else min(left, there - taken))


def who_follows(
    state: TrainState, moves: Moves, holders: Holders, plan: Plan, group: Group, say: Callable[[str], None]
) -> frozenset[int]:
    """Return the ranks that follow the others by a plan, instead of receiving their layers before training goes on.

    `holders` are the ranks that hold each layer. All ranks of the group call this. Raises PeerLost.
    """
    present = frozenset(rank for layer in state.stateful() for rank in holders[layer])
    chosen = followers(moves, present, plan)
    if chosen:
        chosen = _slow(chosen, moves, state, plan, group)
    if not chosen:
        return chosen
    needed = needs(state, plan, chosen, group.rank)
    own = [room_for(group), needed.copies + _LEAST_STEPS * needed.gradients]
    told = group.gather_json(own, fields(number, whole()))
    for rank, (room, wanted) in enumerate(told):
        if wanted > room:
            say(
                f"all ranks wait while newcomers receive their state: going on meanwhile would take "
                f"{human_bytes(wanted)} of memory on rank {rank}, which can spare {human_bytes(room)}"
            )
            return frozenset()
    return chosen


def _slow(chosen: frozenset[int], moves: Moves, state: TrainState, plan: Plan, group: Group) -> frozenset[int]:
    """Return those of the ranks whose state takes long to arrive; for others it is quicker if all wait for it.

    Each asks one of its senders for a piece, and tells how long all of its state would take. Raises PeerLost.
    """
    seconds = 0.0
    first = {receiver: sender for _, sender, receiver in reversed(moves) if receiver in chosen}
    for receiver, sender in sorted(first.items()):
        if group.rank in (sender, receiver):
            began = time.monotonic()
            carry([Parcel("ask", torch.zeros(1, dtype=torch.uint8), receiver, sender)], group, "probe")
            carry([Parcel("piece", torch.zeros(_TRIED_BYTES, dtype=torch.uint8), sender, receiver)], group, "probe")
            if group.rank == receiver:
                rate = _TRIED_BYTES / (time.monotonic() - began)
                seconds = needs(state, plan, chosen, receiver).copies / rate
    told = group.gather_json(seconds, number)
    return frozenset(rank for rank in chosen if told[rank] > _LONG_SECONDS)


class Following:
    """Runs the following of one group on one of its ranks."""

    def __init__(self, state: TrainState, plan: Plan, group: Group, ranks: frozenset[int], room: float) -> None:
        """Copy what is to be sent, and connect; all ranks of the group call this before the first step.

        `ranks` are those that follow. `room` bytes is what this rank's queue of gradients may take. The state must
        have its modules already. Raises PeerLost.
        """
        self.ranks = ranks
        self.behind = group.rank in ranks  # whether this rank has not caught up yet
        self.bytes = 0  # that this rank has received
        self.waited = 0  # of these, those that came while all ranks waited for them
        self._state, self._group, self._room = state, group, room
        self._begun = state.step
        self._received: dict[str, Tensor] = {}
        self._queue: list[tuple[dict[str, Tensor], float, int]] = []  # gradients, learning rate, and step
        self._sizes: Counter[int] = Counter()  # bytes of gradients, by the step that they belong to
        self._lanes = self._prepare(_moves(plan, ranks))
        self._part = _LEAST_PART  # of the time in which a receiver lets pieces travel
        self._done = threading.Event()
        self._started = False
        self._background = Background(group, "follow", group.timeout)

    def _prepare(self, moves: Moves) -> list[list[Parcel]]:
        """Return what this rank sends and receives, in pieces, for each rank at the other end."""
        lanes: dict[tuple[int, int], list[Parcel]] = defaultdict(list)
        for one in parcels(self._state, moves, self._group, copy=True):
            flat = one.tensor.view(-1)
            pieces = flat.split(_PIECE_BYTES // flat.element_size()) if flat.numel() else ()
            lanes[one.source, one.target] += [replace(one, tensor=piece) for piece in pieces]
            if self.behind:
                self._received[one.key] = one.tensor
        return list(lanes.values())

    def start(self) -> None:
        """Begin to send and to receive."""
        self._started = True
        self._background.start(self._transfer)

    def _transfer(self) -> None:
        """Send or receive everything. Raises PeerLost.

        Nothing travels before the receiver asks for it, so it alone sets the pace, and all may be sent at once. A
        receiver asks each of its senders for a piece, and rests between pieces: while the link is busy with sums, it
        leaves most of it to them, since all ranks wait for these.
        """
        twin, layers = self._background.group, self._group.channel("layers")
        leaving = [lane for lane in self._lanes if lane[0].source == twin.rank]
        sent = [one.begin(twin, layers.tag(place)) for lane in leaving for place, one in enumerate(lane)]
        arriving = [lane for lane in self._lanes if lane[0].target == twin.rank]
        for place, few in enumerate(zip_longest(*arriving)):
            began = time.monotonic()
            for work, peer in [one.begin(twin, layers.tag(place)) for one in few if one is not None]:
                twin.wait(work, peer)
            self.bytes += sum(one.tensor.nbytes for one in few if one is not None)
            taken = time.monotonic() - began
            time.sleep(min(taken * (1 / self._part - 1), _LONGEST_REST))
        for work, peer in sent:
            twin.wait(work, peer)
        self._lanes = []
        self._done.set()

    @property
    def arrived(self) -> bool:
        """Return whether all that this rank sends or receives has done so."""
        return self._done.is_set()

    @property
    def early(self) -> int:
        """Return the bytes that this rank has received while the others trained."""
        return self.bytes - self.waited

    @property
    def hurry(self) -> bool:
        """Return whether this rank has room for the gradients of no more than one step."""
        return self.behind and sum(self._sizes.values()) + 2 * max(self._sizes.values(), default=0) > self._room

    @property
    def steps(self) -> int:
        """Return how many steps the others have made since the group began."""
        return self._state.step - self._begun

    def before_step(self) -> None:
        """Catch up, if the state has arrived. Raises PeerLost if it cannot arrive any more."""
        if self._started and not self._background.busy and not self.arrived:
            raise PeerLost("the connections over which ranks send their state to a newcomer are lost")
        if self.behind and self.arrived:
            self._catch_up()

    def after_step(self, transfer: float, wall: float) -> None:
        """Adapt the pace to a step of `wall` seconds, of which this rank spent `transfer` in sums."""
        self._part = max(_LEAST_PART, 1 - transfer / wall)

    def keep(self, parameters: Mapping[str, nn.Parameter], learning_rate: float) -> None:
        """Keep the gradients of a step instead of applying them."""
        gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        self._sizes[self._state.step] += sum(gradient.nbytes for gradient in gradients.values())
        self._queue.append((gradients, learning_rate, self._state.step))

    def _catch_up(self) -> None:
        """Take over the state that has arrived, and apply the gradients that were kept. Raises PeerLost."""
        state, received = self._state, self._received
        newer = {name: buffer.clone() for name, buffer in state.buffers().items()} if self._queue else {}
        try:
            state.load(received.__getitem__, received)
        except (KeyError, ValueError) as error:
            raise PeerLost(f"the state that other ranks have sent is not complete: {error}") from error
        now = state.buffers()
        for name, buffer in newer.items():
            now[name].copy_(buffer)
        for gradients, learning_rate, step in self._queue:
            state.apply(gradients, learning_rate, step)
        self._queue, self._received = [], {}
        self._sizes.clear()
        state.valid, self.behind = True, False

    def finish(self) -> None:
        """Wait until all ranks hold their state; all ranks call this after the same step. Raises PeerLost."""
        before = self.bytes
        while any(self._group.gather_json(self._wait(), boolean)):
            pass
        self.waited = self.bytes - before

    def _wait(self) -> bool:
        """Wait for the state for a moment, and return whether this rank is still behind."""
        self._part = 1.0  # as the link has nothing else to do now
        if self.behind:
            self._done.wait(_LOOK_SECONDS)
        self.before_step()
        return self.behind
