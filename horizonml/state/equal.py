"""Sees that the members of a stage begin with the same state, bit for bit.

Gradients are summed, never parameters: members that begin unequal stay unequal to the end.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from horizonml.engine.engine import Engine
from horizonml.errors import StateDiffers

_TAG = (1 << 30) + 2000


def share_state(engine: Engine) -> list[tuple[int, str]]:
    """Compare the state of every stage's members; give those that differ what their stage's first member holds.

    Return, on all ranks, which ranks differed, each with the name of a tensor that did. All ranks of the group call
    this. Raises StateDiffers if some cannot be made equal.
    """
    differing = _differing(engine)
    if differing:
        _send(engine, differing)
        left = _differing(engine)
        if left:
            raise StateDiffers(
                "members of a stage do not hold the same state: "
                + "; ".join(f"rank {rank} differs in {name}" for rank, name in left)
            )
    return differing


def digest(state: dict[str, Tensor]) -> dict[str, str]:
    """Return a digest of each tensor's name, shape, dtype and bytes."""
    found = {}
    for name, tensor in state.items():
        content = hashlib.blake2b(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), digest_size=16)
        content.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        found[name] = content.hexdigest()
    return found


def _differing(engine: Engine) -> list[tuple[int, str]]:
    """Return the ranks whose state is not that of their stage's first member, each with a tensor that differs."""
    group, plan = engine.group, engine.plan
    if all(len(stage.ranks) == 1 for stage in plan.stages):
        return []
    own = digest(engine.replicated_state())
    together = hashlib.blake2b("".join(f"{k}{own[k]}" for k in sorted(own)).encode(), digest_size=16).hexdigest()
    digests = group.gather_json(together)
    unequal = {rank for stage in plan.stages for rank in stage.ranks if digests[rank] != digests[stage.ranks[0]]}
    if not unequal:
        return []
    # Which tensors: only where there is something to tell.
    every = group.gather_json(own)
    found = []
    for rank in sorted(unequal):
        first = every[plan.stages[plan.stages_of(rank)[0]].ranks[0]]
        names = sorted(name for name in first.keys() | every[rank].keys() if first.get(name) != every[rank].get(name))
        found.append((rank, str(names[0])))
    return found


def _send(engine: Engine, differing: list[tuple[int, str]]) -> None:
    """Send the replicated state of a stage's first member to the members that differ from it."""
    group, plan = engine.group, engine.plan
    state = engine.replicated_state()
    for rank, _ in differing:
        source = plan.stages[plan.stages_of(rank)[0]].ranks[0]
        for place, name in enumerate(sorted(state) if group.rank in (rank, source) else []):
            tensor = state[name].contiguous()
            if group.rank == source:
                group.wait(group.send(tensor, rank, _TAG + place), rank)
            else:
                group.wait(group.receive(tensor, source, _TAG + place), source)
                state[name].copy_(tensor)
