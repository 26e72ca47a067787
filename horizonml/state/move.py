"""Moves the state of a group from one plan to another; only the layers that change hands are sent."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from horizonml.comm.group import Group, Work
from horizonml.errors import PeerLost
from horizonml.plan.plan import Plan
from horizonml.state.train_state import TrainState


def senders(old: Plan, new: Plan) -> list[tuple[int, int, int]]:
    """Return which layer goes from which rank to which: `(layer, from, to)`, in the order of layers.

    A rank that already has a layer receives none; of several possible senders, the one that has sent least sends.
    """
    sent = dict.fromkeys(range(old.world_size), 0)
    found = []
    for layer in range(new.layers):
        holders, wanted = (
            next(stage.ranks for stage in plan.stages if stage.start <= layer < stage.stop) for plan in (old, new)
        )
        for rank in wanted:
            if rank not in holders:
                sender = min(holders, key=lambda holder: (sent[holder], holder))
                sent[sender] += 1
                found.append((layer, sender, rank))
    return found


def move(state: TrainState, old: Plan, new: Plan, group: Group) -> int:
    """Bring the parameters, buffers and optimizer state of each layer to the ranks that hold it in the new plan.

    All ranks must call this, with no session on the state; the next session releases the layers that have moved away.
    Return the bytes that this rank has received. Raises PeerLost.
    """
    held: dict[int, dict[str, Tensor]] = {}
    for key, tensor in state.tensors().items():
        held.setdefault(state.layer_of(key), {})[key] = tensor
    moves = senders(old, new)
    mine = sorted({layer for layer, sender, _ in moves if sender == group.rank})
    # What there is to receive: a rank without the layer does not know whether its optimizer state exists yet.
    offers: dict[int, list[str]] = {}
    for offered in group.gather_json([[layer, list(held[layer])] for layer in mine if layer in held]):
        offers |= {int(layer): [str(key) for key in keys] for layer, keys in offered}
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
