"""Defines the interface through which the members of a stage synchronise its gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from horizonml.comm.group import Group
from horizonml.engine.clock import Clock
from horizonml.engine.staging import Staging
from horizonml.errors import ModelError
from horizonml.models.tuning import still_buffers
from horizonml.plan.plan import Stage
from horizonml.state.parts import TensorSplit


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

    In each step, `begin` is called first, then `arm` before the last backward pass, `send_rest` after it, and `finish`.

    The constructor takes the stage's module and its `Members`; all members construct theirs together. It registers the
    hooks that it needs and may change the module (as tensor parallelism does).
    """

    replicas: int
    """The number of members that work on the same samples."""
    bytes_sent: int
    """The bytes that this member sends in the step under way; it receives as many."""
    are_finite: bool
    """Whether the sums of the step under way have been seen to be finite, each as soon as it was there."""
    parts: Mapping[str, TensorSplit]
    """The parameters and buffers of which this member holds only a part."""

    def begin(self, measure_divergence: bool) -> None:
        """Prepare for a step, in which no parameter has a gradient yet."""

    def arm(self, weight: float, pending: Collection[Tensor] | None = None) -> None:
        """Announce the last backward pass of the step, from which each gradient can be sent as soon as it is computed.

        `weight` is this member's part of the batch. Buffers may still change: by hooks, and by a forward that is
        repeated in the backward pass.
        """

    def send_rest(self, weight: float) -> None:
        """Begin to send what the last backward pass has left, buffers included, while the ranks agree on the step."""

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
    are_finite: bool = False
    parts: Mapping[str, TensorSplit] = field(default_factory=dict)

    def begin(self, measure_divergence: bool) -> None:
        """Do nothing."""

    def arm(self, weight: float, pending: Collection[Tensor] | None = None) -> None:
        """Do nothing."""

    def send_rest(self, weight: float) -> None:
        """Do nothing."""

    def finish(self, weight: float) -> float | None:
        """Leave the gradients as they are."""
        return None

    def close(self) -> None:
        """Do nothing."""


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module that are trained, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


class SyncedBuffers:
    """Finds the buffers of a module that members keep equal: all but those that freezing keeps still.

    They are looked up each time, because a forward may put another tensor in the place of a buffer.
    """

    def __init__(self, module: nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Remember where the buffers are whose names are `wanted`."""
        still, modules = still_buffers(module), dict(module.named_modules())
        self._places: dict[str, tuple[nn.Module, str, torch.Size, torch.dtype]] = {}
        for name, buffer in module.named_buffers():
            path, _, last = name.rpartition(".")
            if name not in still and wanted(name):
                self._places[name] = modules[path], last, buffer.shape, buffer.dtype
        self._agreed = torch.zeros(0)  # the values of those that are averaged, one after the other, at the last sum

    def named(self) -> dict[str, Tensor]:
        """Return the buffers by name. Raises ModelError if one has another shape or type than it had at first."""
        found = {}
        for name, (module, last, shape, dtype) in self._places.items():
            buffer = module._buffers.get(last)
            if buffer is None or buffer.shape != shape or buffer.dtype != dtype:
                now = "nothing" if buffer is None else f"{list(buffer.shape)} {buffer.dtype}"
                raise ModelError(
                    f"buffer {name} was {list(shape)} {dtype} and is {now}: members of a stage, each of which computes "
                    "it from its own samples, can only keep buffers equal whose shapes and types stay as they are "
                    "(parallel.strategy: single trains the model)"
                )
            found[name] = buffer
        return found

    def float_and_other(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the buffers that can be averaged, and those that are counts or flags. Raises ModelError."""
        every = self.named().values()
        return [b for b in every if b.is_floating_point()], [b for b in every if not b.is_floating_point()]

    def begin(self) -> None:
        """Remember the values of the first step's beginning, which all members have alike."""
        if not self._agreed.numel():
            self._agreed = _in_a_row(self.float_and_other()[0])

    @torch.no_grad()
    def to_sum(self, weight: float, leads: bool) -> Tensor:
        """Return flat numbers whose sums over the members `take` is given.

        A buffer that can be averaged is represented by its change, times this member's part of the batch, to which the
        member that `leads` adds the value before it: so what no member changes stays as it is, bit for bit, and
        infinite values may be among it. Of all others, the bytes of that member count.
        """
        averaged, copied = self.float_and_other()
        found = []
        if averaged:
            change = _change(_in_a_row(averaged), self._agreed) * weight
            found.append(self._agreed + change if leads else change)
        if copied:
            found.append(torch.cat([as_bytes(buffer) for buffer in copied]).float() * float(leads))
        return torch.cat(found) if found else self._agreed

    @torch.no_grad()
    def take(self, total: Tensor) -> None:
        """Set the buffers to what the sums say, in the order of `to_sum`."""
        averaged, copied = self.float_and_other()
        size = sum(buffer.numel() for buffer in averaged)
        values = total[:size].split([buffer.numel() for buffer in averaged])
        copies = total[size:].to(torch.uint8).split([buffer.nbytes for buffer in copied])
        for buffer, value in zip(averaged, values, strict=True):
            buffer.copy_(value.view(buffer.shape))
        for buffer, value in zip(copied, copies, strict=True):
            buffer.copy_(value.clone().view(buffer.dtype).view(buffer.shape))  # a view would have to be aligned
        self._agreed = _in_a_row(averaged)


def _in_a_row(buffers: Sequence[Tensor]) -> Tensor:
    """Return the values of floating-point buffers as one vector, of 64-bit floats if any of them has such."""
    wide = any(buffer.dtype == torch.float64 for buffer in buffers)
    flat = [buffer.detach().flatten().to(torch.float64 if wide else torch.float32) for buffer in buffers]
    return torch.cat(flat) if flat else torch.zeros(0)


def _change(now: Tensor, before: Tensor) -> Tensor:
    """Return how far values are from those at the last sum: 0 also where both are infinite, or not a number."""
    return torch.where((now == before) | (now.isnan() & before.isnan()), 0.0, now - before)


APART = 1e-4  # of their norm: how far what is to be equal may be apart, for devices round differently
_LOOKS, _SELDOM = 3, 64  # steps at the start of a session, and steps between two later looks at most
_PERIOD = 4093  # of the random numbers that tensors are multiplied by
_random = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0))


def is_looked_at(step: int) -> bool:
    """Return whether what is to be equal is compared in a session's step: in the first ones, and ever more seldom."""
    return step <= _LOOKS or step & (step - 1) == 0 or step % _SELDOM == 0


@torch.no_grad()
def projections(tensors: Sequence[Tensor]) -> Tensor:
    """Return for each tensor its product with fixed random numbers, and its norm, as a tensor of [2, tensors] doubles.

    Unlike norms, the products also differ where values have changed their places or their signs.
    """
    found = []
    for tensor in tensors:
        flat = tensor.detach().flatten().float()
        random, whole = _random.to(flat.device), len(flat) // _PERIOD * _PERIOD
        rows = flat[:whole].view(-1, _PERIOD) @ random
        total = rows @ torch.arange(1, len(rows) + 1, device=flat.device).float().cos()
        found.append(torch.stack([total + flat[whole:] @ random[: len(flat) - whole], flat.norm()]))
    return torch.stack(found, 1).double()


def as_bytes(buffer: Tensor) -> Tensor:
    """Return a buffer's bytes, which sums with zeros leave as they are: larger numbers would be rounded."""
    return buffer.detach().contiguous().flatten().view(torch.uint8)
