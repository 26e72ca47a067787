"""Moves layers between the ranks of a group, as a new plan asks for; only layers that change hands are sent.

Copies a rank's state in memory, so that it can be restored.

Tells how large the files and messages of a state can be at most, before memory or disk is taken for them.

What a rank or a checkpoint announces is compared with this: the model says what there can be.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from horizonml.comm.expected import boolean, fields, items, text, whole
from horizonml.comm.group import Group
from horizonml.comm.work import Work
from horizonml.errors import CheckpointError, PeerLost
from horizonml.plan.plan import Plan
from horizonml.state.train_state import TrainState

Moves = list[tuple[int, int, int]]  # (layer, from, to), in the order of layers
Holders = Sequence[Sequence[int]]  # the ranks that hold each layer


def holders(plan: Plan) -> Holders:
    """Return the ranks that hold each layer in a plan."""
    return [next(stage.ranks for stage in plan.stages if stage.start <= n < stage.stop) for n in range(plan.layers)]


def senders(held: Holders, plan: Plan) -> Moves:
    """Return which layer goes from which rank to which, so that every rank has its layers in the plan.

    A rank that already has a layer receives none; of several possible senders, the one that has sent least sends.
    """
    sent: Counter[int] = Counter()
    found = []
    for layer, (there, wanted) in enumerate(zip(held, holders(plan), strict=True)):
        for rank in wanted:
            if rank not in there:
                sender = min(there, key=lambda holder: (sent[holder], holder))
                sent[sender] += 1
                found.append((layer, sender, rank))
    return found


def by_layer(state: TrainState) -> dict[int, dict[str, Tensor]]:
    """Return the tensors that a rank holds, by layer; without those that the others have from a file."""
    held: dict[int, dict[str, Tensor]] = {}
    for key, tensor in state.tensors().items():
        if not state.is_constant(key):
            held.setdefault(state.layer_of(key), {})[key] = tensor
    return held


def announce(held: Mapping[int, Mapping[str, Tensor]], moves: Moves, group: Group) -> dict[int, list[str]]:
    """Return which tensors of each layer are to be sent; all ranks call this, with what they hold. Raises PeerLost.

    A rank without the layer does not know whether its optimizer state exists yet.
    """
    mine = sorted({layer for layer, sender, _ in moves if sender == group.rank})
    offers: dict[int, list[str]] = {}
    own = [[layer, list(held[layer])] for layer in mine if layer in held]
    for rank, offered in enumerate(group.gather_json(own, items(fields(whole(), items(text))))):
        for layer, keys in offered:
            if not any(sender == rank for moved, sender, _ in moves if moved == layer) or len({*keys}) < len(keys):
                raise PeerLost(f"rank {rank} offers layer {layer}, which it is not asked for, or a tensor of it twice")
            offers[layer] = offers.get(layer, []) + [key for key in keys if key not in offers.get(layer, [])]
    return offers


def move(state: TrainState, moves: Moves, group: Group) -> int:
    """Send the parameters, buffers and optimizer state of layers from ranks to ranks.

    All ranks must call this, with no session on the state; the next session releases the layers that have moved away,
    and reads what is frozen from the file of pretrained weights.
    Return the bytes that this rank has received. Raises PeerLost.
    """
    held = by_layer(state)
    offers = announce(held, moves, group)
    works: list[tuple[Work, int, Tensor]] = []
    received: dict[str, Tensor] = {}
    tags = map(group.channel("layers").tag, itertools.count())
    for layer, sender, receiver in moves:
        expected = state.expected(layer) if receiver == group.rank else {}
        for key in offers.get(layer, []):
            tag = next(tags)
            if group.rank == sender:
                tensor = held[layer][key].contiguous().view(-1)
                works.append((group.send(tensor, receiver, tag), receiver, tensor))
            elif group.rank == receiver:
                if key not in expected:  # a peer decides neither shapes nor dtypes
                    raise PeerLost(f"rank {sender} offers {key}, which layer {layer} does not have")
                received[key] = torch.empty(expected[key].shape, dtype=expected[key].dtype)
                works.append((group.receive(received[key].view(-1), sender, tag), sender, received[key]))
    for work, peer, _ in works:
        group.wait(work, peer)
    state.put(received)
    return sum(tensor.nbytes for tensor in received.values())


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


class StateCopy:
    """Holds a copy of all that a rank trains, and of how far it has come."""

    def __init__(self, state: TrainState) -> None:
        """Copy a state that is whole and valid."""
        assert state.valid
        assert not state.parts
        self._state, self._tensors, self._optimizer = state, *state.contents(copy=True)
        self._step, self._metrics, self._best = state.step, dict(state.metrics), dict(state.best)
        self._scales = copy.deepcopy(state.scales)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state; its layers, and the tensors that hold them, are the same as before."""
        state = self._state
        held, _ = state.contents()
        for name, value in self._tensors.items():
            held[name].copy_(value)
        state.replace_optimizer(
            {name: {key: v.clone() for key, v in kept.items()} for name, kept in self._optimizer.items()}
        )
        state.step, state.metrics, state.best = self._step, dict(self._metrics), dict(self._best)
        state.scales, state.prepared, state.valid = copy.deepcopy(self._scales), None, True


_HEADER, _ENTRY = 1 << 16, 512  # the most bytes of a file's header, and of a tensor's entry in it besides its name
_TIMES = 4  # another optimizer than the job's may have written a checkpoint, and keep more


def most_bytes(state: TrainState, layers: Iterable[int]) -> int:
    """Return the most bytes of a file with the whole state of these layers, as the job's optimizer keeps it."""
    held = (state.expected(layer) for layer in layers)
    return _HEADER + sum(tensor.nbytes + len(key) + _ENTRY for tensors in held for key, tensor in tensors.items())


def most_of_shards(state: TrainState, plan: Plan) -> list[int]:
    """Return the most bytes of each stage's shard."""
    return [most_bytes(state, range(stage.start, stage.stop)) for stage in plan.stages]


def check_shard(state: TrainState, name: str, start: int, stop: int, announced: int) -> None:
    """Raise CheckpointError if a shard of layers `start` to `stop - 1` is said to be larger than it can be."""
    layers = range(start, min(stop, len(state.model.chain)))
    most = _TIMES * most_bytes(state, layers)
    if announced > most:
        raise CheckpointError(
            f"{name} is said to have {announced:,} bytes, but the state of layers {start} to {stop - 1} has at most "
            f"{most:,}; the checkpoint belongs to another model, or its metadata is false"
        )
