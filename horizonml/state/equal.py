"""Ensures that the members of a stage begin with the same state, bit for bit.

Gradients are summed, and parameters never are, so members that begin unequal would stay unequal to the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horizonml.comm.expected import mapping, text
from horizonml.comm.group import Group
from horizonml.errors import StateDiffers
from horizonml.plan.plan import Plan
from horizonml.state.average import in_common
from horizonml.state.train_state import TrainState

Digests = dict[str, str]  # of the state of each stage that a rank shares with others, by the stage's number


def digests_of(state: TrainState, plan: Plan, rank: int) -> Digests:
    """Return what the members of a stage compare."""
    return {str(number): _together(digests) for number, digests in _digests(state, plan, rank).items()}


def share_state(
    state: TrainState, plan: Plan, group: Group, everyone: Sequence[Digests] | None = None
) -> list[tuple[int, str]]:
    """Compare the state of every stage's members, and give the state of the first member to those that differ.

    Return, on all ranks, the ranks that differed, each with the name of a tensor that did. All ranks of the group call
    this, with the digests of all ranks if they know them already. Raises StateDiffers if some cannot be made equal.
    """
    differing = _differing(state, plan, group, everyone)
    if differing:
        _send(state, plan, group, differing)
        left = _differing(state, plan, group)
        if left:
            raise StateDiffers(
                "members of a stage do not hold the same state: "
                + "; ".join(f"rank {one.rank} differs in {one.name}" for one in left)
            )
    return [(one.rank, one.name) for one in differing]


def digest(state: dict[str, Tensor]) -> dict[str, str]:
    """Return a digest of each tensor's name, shape, dtype and bytes."""
    found = {}
    for name, tensor in state.items():
        content = hashlib.blake2b(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), digest_size=16)
        content.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        found[name] = content.hexdigest()
    return found


@dataclass(frozen=True)
class _Difference:
    """Describes a member whose state differs from that of its stage's first member."""

    rank: int
    stage: int
    name: str  # of a tensor that differs


def _digests(state: TrainState, plan: Plan, rank: int) -> dict[int, dict[str, str]]:
    """Return the digests of the replicated state, for each stage of this rank that has other members."""
    found = {}
    for number in plan.stages_of(rank):
        stage = plan.stages[number]
        if len(stage.ranks) > 1:
            found[number] = digest(in_common(state.replicated(stage.start, stage.stop), plan))
    return found


def _differing(
    state: TrainState, plan: Plan, group: Group, everyone: Sequence[Digests] | None = None
) -> list[_Difference]:
    """Return the members whose state is not that of their stage's first member, each with a tensor that differs."""
    if all(len(stage.ranks) == 1 for stage in plan.stages):
        return []
    if everyone is None:
        everyone = group.gather_json(digests_of(state, plan, group.rank), mapping(text))
    unequal = [
        (rank, number)
        for number, stage in enumerate(plan.stages)
        for rank in stage.ranks[1:]
        if everyone[rank].get(str(number)) != everyone[stage.ranks[0]].get(str(number))
    ]
    if not unequal:
        return []
    # The tensors are compared only where there is a difference to report.
    own = _digests(state, plan, group.rank)
    every = group.gather_json({str(number): digests for number, digests in own.items()}, mapping(mapping(text)))
    found = []
    for rank, number in unequal:
        first, other = (every[one].get(str(number), {}) for one in (plan.stages[number].ranks[0], rank))
        if first.keys() != other.keys():
            names = sorted(first.keys() ^ other.keys())
            raise StateDiffers(f"rank {rank} and rank {plan.stages[number].ranks[0]} do not both hold {names[0]}")
        names = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
        found.append(_Difference(rank, number, str(names[0])))
    return found


def _together(digests: dict[str, str]) -> str:
    text = "".join(f"{name}{digests[name]}" for name in sorted(digests))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _send(state: TrainState, plan: Plan, group: Group, differing: list[_Difference]) -> None:
    channel = group.channel("state")
    for one in differing:
        stage = plan.stages[one.stage]
        source = stage.ranks[0]
        if group.rank not in (one.rank, source):
            continue
        tensors = in_common(state.replicated(stage.start, stage.stop), plan)
        for place, name in enumerate(sorted(tensors)):
            tensor = tensors[name].contiguous()
            if group.rank == source:
                group.wait(group.send(tensor, one.rank, channel.tag(place)), one.rank)
            else:
                group.wait(group.receive(tensor, source, channel.tag(place)), source)
                state.overwrite({name: tensor})
