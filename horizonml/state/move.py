"""Moves layers between the ranks of a group, as a new plan asks for; only layers that change hands are sent."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from horizonml.comm.expected import fields, items, text, whole
from horizonml.comm.group import Group
from horizonml.comm.work import Work
from horizonml.errors import PeerLost
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
