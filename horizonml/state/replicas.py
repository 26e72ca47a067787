"""Tells whose state is copied to whose memory, and how what was lost with a rank is rebuilt from the copies.

An owner is a rank that alone holds some state: the only member of its stages, or one of the members that split the
channels of a stage. The copies of members that split a stage are of the same step, so that they make up whole layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from horizonml.errors import PeerLost
from horizonml.plan.plan import Plan

Ties = Sequence[Sequence[int]]
"""The layers that share a parameter, for each parameter that several layers share."""


@dataclass(frozen=True)
class Replica:
    """Holds the state of an owner as it was at a step; without `content`, that is the initial one."""

    owner: int
    step: int
    content: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name. Raises PeerLost if the owner has not sent what it announced."""
        try:
            return load(self.content.numpy().tobytes()) if self.content is not None else {}
        except SafetensorError as error:
            raise PeerLost(f"the copy of rank {self.owner}'s state cannot be read: {error}") from error


def owners(plan: Plan) -> list[int]:
    """Return the ranks that hold state of which no other rank holds all, where there are several ranks."""
    if plan.world_size == 1:
        return []
    return [
        rank
        for rank in range(plan.world_size)
        if plan.stages_of(rank)
        and all(
            len(plan.stages[number].ranks) == 1 or plan.stages[number].splits_channels
            for number in plan.stages_of(rank)
        )
    ]


def together(plan: Plan, owner: int) -> tuple[int, ...]:
    """Return the owners whose copies make up whole layers: the members of a stage that is split, or the owner alone."""
    split = [plan.stages[number] for number in plan.stages_of(owner) if plan.stages[number].splits_channels]
    return split[0].ranks if split else (owner,)


def buddy(plan: Plan, owner: int, hosts: Sequence[str] | None = None) -> int:
    """Return the rank that keeps the replica of an owner: a member of the stage after its last one.

    In a stage that is split, that is the next member; if no other rank has layers, it is one without. If the machines
    of the ranks are known, one on another machine comes first.
    """
    group = together(plan, owner)
    place = group.index(owner) + 1
    after = (max(plan.stages_of(owner)) + 1) % len(plan.stages)
    around = [plan.stages[number % len(plan.stages)] for number in range(after, after + len(plan.stages))]
    candidates = [rank for stage in around for rank in stage.ranks if rank not in group]
    candidates += [rank for rank in (*group[place:], *group[:place], *plan.spare) if rank != owner]
    return min(candidates, key=lambda rank: hosts is not None and hosts[rank] == hosts[owner])


def keepers(plan: Plan, owner: int, ties: Ties = ()) -> set[int]:
    """Return the ranks that send messages to an owner: the members of the neighbouring stages.

    Where layers share parameters (each of the `ties` lists such layers), the members of these layers' stages send
    gradients to each other. A stage that is split is the only one of its plan, so its members need no messages but the
    samples.
    """
    own = plan.stages_of(owner)
    beside = {number + step for number in own for step in (-1, 1)}
    for layers in ties:
        sharing = {plan.stage_of(layer) for layer in layers}
        if sharing & set(own):
            beside |= sharing
    return {rank for number in beside if 0 <= number < len(plan.stages) for rank in plan.stages[number].ranks} - {owner}


@dataclass(frozen=True)
class Rebuild:
    """Tells how the stages of lost owners are rebuilt. Ranks are those of the group that was lost."""

    owners: tuple[int, ...]  # whose copies make up the layers
    step: int  # of the copies
    builder: int
    copies: tuple[int, ...]  # the rank that the builder has each owner's copy from
    keepers: tuple[int, ...]  # the ranks that have messages to the owner

    @property
    def sources(self) -> list[int]:
        """Return the ranks that have something the builder needs."""
        return sorted({*self.copies, *self.keepers})


def rebuilds(
    plan: Plan, missing: list[int], reports: Mapping[int, Mapping[str, Any]], ties: Ties = ()
) -> list[Rebuild] | None:
    """Return how to rebuild the owners of the missing layers, or None if it cannot be done.

    `reports[r]` is the report of rank r of the group that was lost, if it survived.
    """
    lost = sorted(
        {rank for stage in plan.stages for rank in stage.ranks if any(stage.start <= n < stage.stop for n in missing)}
    )
    if not set(lost) <= set(owners(plan)):
        return None
    found = []
    for group in dict.fromkeys(together(plan, owner) for owner in lost):
        if len(group) == 1 and group[0] in reports:
            return None
        having = [
            {(int(step), rank) for rank, report in reports.items() for step in report["replicas"].get(str(owner), [])}
            for owner in group
        ]
        steps = set.intersection(*({step for step, _ in there} for there in having))
        sources = set[int]().union(*(keepers(plan, owner, ties) for owner in group))
        if not steps or not sources <= reports.keys():
            return None
        step = max(steps)
        ranks = [[rank for at, rank in sorted(there) if at == step] for there in having]
        # An initial state is known to all, and a copy to its buddy only, which therefore comes first.
        able = sorted(set().union(*ranks))
        builder = max(able, key=lambda rank: (sum(rank in there for there in ranks), rank == buddy(plan, group[0])))
        firsts = [reports[rank]["log"] for rank in sources]
        if any(first is None or int(first) > step for first in firsts):
            return None
        copies = tuple(builder if builder in there else there[0] for there in ranks)
        found.append(Rebuild(group, step, builder, copies, tuple(sorted(sources))))
    return found
