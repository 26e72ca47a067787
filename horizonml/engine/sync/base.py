"""Defines the interface through which the members of a stage synchronise its gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from horizonml.comm.group import Group
from horizonml.engine.clock import Clock
from horizonml.engine.staging import Staging
from horizonml.models.freezing import still_buffers
from horizonml.plan.plan import Stage
from horizonml.state.parts import Part


@dataclass
class Members:
    """Describes the members of a stage from the point of view of one of them."""

    stage: Stage  # whose shares may change between two steps
    number: int  # the number of the stage in its plan
    group: Group
    clock: Clock
    staging: Staging = field(default_factory=Staging)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the members' ranks."""
        return self.stage.ranks

    @property
    def place(self) -> int:
        """Return the position of this rank among the members."""
        return self.stage.ranks.index(self.group.rank)

    @property
    def leads(self) -> bool:
        """Return whether this is the first member that has a share; what cannot be averaged is taken from it."""
        return self.place == next(place for place, share in enumerate(self.stage.shares) if share > 0)


class GradientSync(Protocol):
    """Synchronises gradients in one way.

    In each step, `begin` is called first, then `arm` before the last backward pass, then `finish`.

    The constructor takes the stage's module and its `Members`; all members construct theirs together. It registers the
    hooks that it needs and may change the module (as tensor parallelism does).
    """

    replicas: int
    """The number of members that work on the same samples."""
    bytes_sent: int
    """The bytes that this member sends in the step under way; it receives as many."""
    parts: Mapping[str, Part]
    """The parameters and buffers of which this member holds only a part."""

    def begin(self, measure_divergence: bool) -> None:
        """Prepare for a step, in which no parameter has a gradient yet."""

    def arm(self, weight: float, pending: Collection[Tensor] | None = None) -> None:
        """Announce the last backward pass of the step, from which each gradient can be sent as soon as it is computed.

        `weight` is this member's part of the batch. All forward passes are done, so running statistics are final.
        """

    def finish(self, weight: float) -> float | None:
        """Replace the gradients by their sums over all members, and synchronise running statistics. Raises PeerLost.

        Return the divergence `|g_i - g| / |g|` of this member's own mean gradient from the stage's, if `begin` asked
        for it and this member had samples; otherwise return None.
        """

    def close(self) -> None:
        """Remove the hooks; the parameters outlive the group."""


@dataclass
class Alone:
    """Implements `GradientSync` for a stage with a single member."""

    replicas: int = 1
    bytes_sent: int = 0
    parts: Mapping[str, Part] = field(default_factory=dict)

    def begin(self, measure_divergence: bool) -> None:
        """Do nothing."""

    def arm(self, weight: float, pending: Collection[Tensor] | None = None) -> None:
        """Do nothing."""

    def finish(self, weight: float) -> float | None:
        """Leave the gradients as they are."""
        return None

    def close(self) -> None:
        """Do nothing."""


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module that are trained, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def synced_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a module that members keep equal, by name: all but those that freezing keeps still."""
    still = still_buffers(module)
    return {name: buffer for name, buffer in module.named_buffers() if name not in still}


def float_and_other(buffers: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the buffers that can be averaged, and those that are counts or flags."""
    every = list(buffers)
    return [b for b in every if b.is_floating_point()], [b for b in every if not b.is_floating_point()]


def as_bytes(buffer: Tensor) -> Tensor:
    """Return a buffer's bytes as numbers, which sums with zeros leave as they are: larger numbers would be rounded."""
    return buffer.detach().contiguous().flatten().view(torch.uint8).float()
