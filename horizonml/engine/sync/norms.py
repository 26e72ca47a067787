"""Lets `nn.SyncBatchNorm` normalise over all samples of a micro-batch that the members of a stage share.

PyTorch's own layer needs a GPU and the default process group, and is plain BatchNorm without them. The members here sum
counts, sums and squared distances from the mean in the forward pass, and two sums in the backward pass. The parameters'
gradients are those of a member's own samples, which are summed with all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from horizonml.engine.sync.base import Members
from horizonml.errors import ModelError

_OF_NORMS = 1 << 16  # sets these sums apart from those of the stages' gradients, whose order is another


class SyncedNorms:
    """Synchronises the `nn.SyncBatchNorm` layers of a stage's module, until it is closed."""

    def __init__(self, module: nn.Module, members: Members) -> None:
        """Take over the layers' forward, if the stage has several members that share the samples."""
        self._members = members
        shares = len(members.ranks) > 1 and not members.stage.splits_channels
        self._norms = [one for one in module.modules() if isinstance(one, nn.SyncBatchNorm)] if shares else []
        self._ranks: tuple[int, ...] = ()  # the members that have rows of the micro-batch under way
        for norm in self._norms:
            if type(norm).forward is not nn.SyncBatchNorm.forward:
                raise ModelError(
                    f"{type(norm).__name__} has a forward of its own, so that members cannot synchronise it; use "
                    "nn.SyncBatchNorm itself, and put the rest into a module around it"
                )
            norm.forward = _Forward(self, norm)  # type: ignore[method-assign, assignment]
        if self._norms:
            self._members.group.among(self._members.ranks, _OF_NORMS + self._members.number)

    def begin(self, rows: Sequence[tuple[int, int]]) -> None:
        """Prepare for a micro-batch of which each member has these rows."""
        if self._norms:
            pairs = zip(self._members.ranks, rows, strict=True)
            self._ranks = tuple(rank for rank, (start, stop) in pairs if stop > start)

    def close(self) -> None:
        """Give the layers their own forward back."""
        for norm in self._norms:
            norm.__dict__.pop("forward", None)
        self._norms = []

    def normalise(self, norm: nn.SyncBatchNorm, value: Tensor) -> Tensor:
        """Return what a layer returns."""
        if not (norm.training or norm.running_mean is None) or not self._ranks:
            return functional.batch_norm(
                value, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
            )
        found, mean, variance, count = _Normalise.apply(value, norm.weight, norm.bias, norm.eps, self, self._ranks)  # type: ignore[no-untyped-call]
        if norm.track_running_stats and norm.running_mean is not None and norm.running_var is not None:
            with torch.no_grad():
                if norm.num_batches_tracked is not None:
                    norm.num_batches_tracked.add_(1)
                    tracked = int(norm.num_batches_tracked)
                factor = 1 / tracked if norm.momentum is None else norm.momentum
                norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), factor)
                unbiased = variance * (count / (count - 1)) if count > 1 else variance
                norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), factor)
        result: Tensor = found
        return result

    def sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """Return the sum of the members' tensors, in the host's memory. Raises PeerLost."""
        if len(ranks) == 1:
            return tensor
        members = self._members
        members.clock.switch("transfer", "normalise")
        here = members.staging.to_host(tensor)
        members.group.wait(members.group.all_reduce(here, ranks, _OF_NORMS + members.number))
        members.clock.switch("compute", "normalise")
        return members.staging.to_device(here)


class _Forward:
    """Takes the place of a layer's `forward`; unlike a closure, it is not copied with the layer."""

    def __init__(self, norms: SyncedNorms, norm: nn.SyncBatchNorm) -> None:
        self._norms, self._norm = norms, norm

    def __call__(self, value: Tensor) -> Tensor:
        return self._norms.normalise(self._norm, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return self


class _Normalise(torch.autograd.Function):
    """Normalises with the mean and the variance over all members' samples."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        norms: SyncedNorms,
        ranks: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        others = [dimension for dimension in range(value.dim()) if dimension != 1]
        shape = [1, -1, *[1] * (value.dim() - 2)]
        own = value.numel() / value.shape[1]
        sums = norms.sum(torch.cat([value.sum(others).double(), value.new_tensor([own]).double()]), ranks)
        count = sums[-1]
        mean = (sums[:-1] / count).to(value.dtype)
        apart = value - mean.view(shape)
        variance = (norms.sum(apart.square().sum(others).double(), ranks) / count).to(value.dtype)
        scale = (variance + eps).rsqrt()
        normal = apart * scale.view(shape)
        ctx.save_for_backward(normal, weight, scale)
        ctx.norms, ctx.ranks, ctx.count, ctx.has_bias = norms, ranks, float(count), bias is not None
        result = normal if weight is None else normal * weight.view(shape)
        result = result if bias is None else result + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance)
        return result, mean, variance, int(count)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        normal, weight, scale = ctx.saved_tensors
        kept = [dimension for dimension in range(gradient.dim()) if dimension != 1]
        shape = [1, -1, *[1] * (gradient.dim() - 2)]
        own_bias, own_weight = gradient.sum(kept), (gradient * normal).sum(kept)
        total = ctx.norms.sum(torch.cat([own_bias, own_weight]).double(), ctx.ranks) / ctx.count
        mean, slope = (part.to(gradient.dtype).view(shape) for part in total.chunk(2))
        inward = (gradient - mean - normal * slope) * scale.view(shape)
        if weight is not None:
            inward = inward * weight.view(shape)
        return (
            inward,
            own_weight if weight is not None else None,
            own_bias if ctx.has_bias else None,
            None,
            None,
            None,
        )
