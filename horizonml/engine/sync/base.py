"""The interface of all ways in which the members of a stage agree on its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from horizonml.comm.group import Group
from horizonml.engine.clock import Clock
from horizonml.plan.plan import Stage
from horizonml.state.parts import Part


@dataclass(frozen=True)
class Members:
    """The members of a stage, as one of them sees them."""

    stage: Stage
    number: int  # the stage's, in its plan
    group: Group
    clock: Clock

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks."""
        return self.stage.ranks

    @property
    def place(self) -> int:
        """The place of this rank among the members."""
        return self.stage.ranks.index(self.group.rank)


class GradientSync(Protocol):
    """One way to agree. For each step: `begin`, then `arm` before the last backward pass, then `finish`.

    The constructor takes the stage's module and its `Members`; all members construct theirs together. It may change the
    module (as tensor parallelism does), and registers the hooks that it needs.
    """

    replicas: int
    """How many members work on the same samples."""
    bytes_sent: int
    """In the step under way, by this member; as many are received."""
    parts: Mapping[str, Part]
    """The parameters and buffers of which this member holds a part only."""

    def begin(self, measure_divergence: bool) -> None:
        """Prepare for a step; no parameter has a gradient."""

    def arm(self, weight: float) -> None:
        """Learn that the next backward pass is the step's last, so that each gradient may leave when it is there.

        `weight` is this member's part of the batch. All forward passes are done: running statistics are final.
        """

    def finish(self, weight: float) -> float | None:
        """Make the sums over all members the parameters' gradients, and running statistics alike. Raises PeerLost.

        Returns the divergence `|g_i - g| / |g|` of this member's own mean gradient from the stage's, if `begin` asked
        for it and this member had samples.
        """

    def close(self) -> None:
        """Remove the hooks: the parameters outlive the group."""


@dataclass
class Alone:
    """The only member of a stage agrees with itself."""

    replicas: int = 1
    bytes_sent: int = 0
    parts: Mapping[str, Part] = field(default_factory=dict)

    def begin(self, measure_divergence: bool) -> None:
        """Do nothing."""

    def arm(self, weight: float) -> None:
        """Do nothing."""

    def finish(self, weight: float) -> float | None:
        """Leave the gradients as they are."""
        return None

    def close(self) -> None:
        """Do nothing."""


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters that are trained, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def float_and_other(buffers: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return buffers that can be averaged, and those that are counts or flags."""
    every = list(buffers)
    return [b for b in every if b.is_floating_point()], [b for b in every if not b.is_floating_point()]
