"""Takes snapshots: what a rank writes of a checkpoint, as it was at one step boundary."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horizonml.comm.group import Group
from horizonml.plan.plan import Plan
from horizonml.state.disks import Disks
from horizonml.state.outer import in_common, is_inner
from horizonml.state.shards import inner_name
from horizonml.state.sizes import most_of_shards
from horizonml.state.train_state import TrainState

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Snapshot:
    """Holds what one rank writes of a checkpoint."""

    step: int
    plan: Plan
    details: dict[str, Any]  # for the metadata
    tensors: dict[int, dict[str, Tensor]]  # those of each stage whose shard this rank writes
    most: list[int]  # bytes that each stage's shard can have
    inner: dict[str, dict[str, Tensor]]  # the state of this rank's own optimizer by file, after local steps


def take(state: TrainState, plan: Plan, group: Group, disks: Disks, details: dict[str, Any], *, copy: bool) -> Snapshot:
    """Return a snapshot of the state; all ranks call this after the same step. Raises PeerLost.

    Unless `copy` is true, it consists of the state's own tensors, and is valid only until the next step.
    """
    tensors: dict[int, dict[str, Tensor]] = {}
    inner: dict[str, dict[str, Tensor]] = {}
    for number in plan.stages_of(group.rank):
        stage = plan.stages[number]
        whole = state.whole(group, stage.start, stage.stop)  # all members have to put them together
        if group.rank in disks.writers(stage.ranks).values():
            copied = copy and not state.copies
            tensors[number] = {key: _plain(value, copied) for key, value in in_common(whole, plan).items()}
        if plan.local is not None:
            own = {key: _plain(value, copy and not state.copies) for key, value in whole.items() if is_inner(key)}
            inner[inner_name(stage.ranks.index(group.rank), number)] = own
    return Snapshot(state.step, plan, details, tensors, most_of_shards(state, plan), inner)


def _plain(tensor: Tensor, copy: bool) -> Tensor:
    tensor = tensor.detach()
    return tensor.clone(memory_format=torch.contiguous_format) if copy else tensor.contiguous()


def fingerprints(state: TrainState, plan: Plan, rank: int) -> dict[str, str]:
    """Return a value for each stage that this rank shares with others, which differs where their states differ.

    All steps wait for this, so it adds up the bits of each tensor, which is ten times as fast as a digest. Differences
    that come from rounding do not cancel out in all tensors at once.
    """
    found = {}
    for number in plan.stages_of(rank):
        stage = plan.stages[number]
        if len(stage.ranks) > 1:
            shared = in_common(state.replicated(stage.start, stage.stop), plan)
            sums = [f"{key} {_sum(value)}\n" for key, value in sorted(shared.items())]
            found[str(number)] = hashlib.sha256("".join(sums).encode()).hexdigest()
    return found


def _sum(tensor: Tensor) -> int:
    """Return the sum of a tensor's bits, taken as integers; it wraps around."""
    flat = tensor.detach().contiguous().view(-1)
    wide = flat.numel() * flat.element_size() % 8 == 0
    return int(flat.view(torch.int64 if wide else _INTEGERS[flat.element_size()]).sum(dtype=torch.int64))


def unequal(plan: Plan, reports: list[Mapping[str, Any]]) -> bool:
    """Return whether the members of any stage reported different fingerprints; `reports[r]` is rank r's."""
    return any(
        len({str(reports[rank].get(str(number))) for rank in stage.ranks}) > 1
        for number, stage in enumerate(plan.stages)
    )


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a tensor with values that are not finite, if there is one.

    It looks at pieces that PyTorch does not divide among threads, which the training needs.
    """
    for key, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            for piece in tensor.view(-1).split(1 << 14):
                if not bool(torch.isfinite(piece).all()):
                    return key
    return None
