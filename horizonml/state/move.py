"""Takes a group's training from one plan to another: only the layers that change hands travel."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from horizonml.engine.engine import Engine
from horizonml.engine.group import Group
from horizonml.errors import PeerLost
from horizonml.models.zoo import Model
from horizonml.plan.plan import Plan

_TAG = (1 << 30) + 1000


def senders(old: Plan, new: Plan) -> list[tuple[int, int, int]]:
    """Which layer goes from which rank to which: `(layer, from, to)`, in the order of layers.

    A rank that has a layer already gets none; of several that could send, those send that have sent least.
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


def move(old: Engine, new: Engine, model: Model, group: Group) -> int:
    """Give the new engine what the old ones hold: parameters, buffers, optimizer state. All ranks must call this.

    Returns the bytes that this rank has received. Raises PeerLost.
    """
    layer_of = model.parameter_names()
    held = old.state()
    names: dict[int, list[str]] = {}  # a tensor is called model/NAME or optimizer/NAME/KEY
    for key in held:
        name = key.partition("/")[2]
        name = name.rpartition("/")[0] if key.startswith("optimizer/") else name
        names.setdefault(layer_of[name], []).append(key)
    moves = senders(old.plan, new.plan)
    mine = sorted({layer for layer, sender, _ in moves if sender == group.rank})
    # What there is to receive: a rank without the layer does not know what its optimizer keeps.
    offers: dict[int, list[str]] = {}
    for offered in group.gather_json([[layer, names[layer]] for layer in mine if layer in names]):
        offers |= {int(layer): [str(key) for key in keys] for layer, keys in offered}
    works: list[tuple[Any, int, Tensor]] = []
    received: dict[str, Tensor] = {}
    tags = itertools.count(_TAG)
    for layer, sender, receiver in moves:
        for key in offers.get(layer, []):
            tag = next(tags)
            if group.rank == sender:
                tensor = held[key].contiguous().view(-1)
                works.append((group.send(tensor, receiver, tag), receiver, tensor))
            elif group.rank == receiver:
                expected = new.expects(key)  # a peer decides neither shapes nor dtypes
                if expected is None:
                    raise PeerLost(f"rank {sender} offers {key}, which layer {layer} does not have")
                received[key] = torch.empty(expected.shape, dtype=expected.dtype)
                works.append((group.receive(received[key].view(-1), sender, tag), sender, received[key]))
    for work, peer, _ in works:
        group.wait(work, peer)
    together = {**held, **received}
    new.load_state(together.__getitem__, together)
    return sum(tensor.nbytes for tensor in received.values())
