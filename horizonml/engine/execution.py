"""Runs the layers of a stage in the memory format and the precision that this device has chosen.

What enters the stage is converted to its memory format, and what leaves it has the dtypes of the boundary and the usual
memory format.

With bf16, `torch.autocast` computes matrix products and convolutions in 16 bits from float32 parameters. Their
gradients become float32 where they leave the graph, so all sums over micro-batches and members are in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from horizonml.models.boundary import Values
from horizonml.models.cutting import Uncut
from horizonml.models.zoo import Model
from horizonml.plan.execution import PLAIN, Execution
from horizonml.plan.plan import Sync

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)

Forward = Callable[..., Any]


class _Convert(torch.autograd.Function):
    """Converts a tensor to another memory format and dtype, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, form: torch.memory_format, dtype: torch.dtype) -> Tensor:
        ctx.form, ctx.dtype = memory_format(value), value.dtype
        return value.to(dtype=dtype, memory_format=form)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.to(dtype=ctx.dtype, memory_format=ctx.form), None, None


def memory_format(value: Tensor) -> torch.memory_format:
    """Return the memory format in which the gradient of a tensor should lie."""
    if value.dim() == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def convert(value: Any, channels_last: bool, dtype: torch.dtype | None = None) -> Any:
    """Return a tensor in a memory format and, if it is floating-point, with a dtype; all else stays as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    wanted = value.dtype if dtype is None else dtype
    form = torch.channels_last if channels_last and value.dim() == 4 else torch.contiguous_format
    if value.dtype == wanted and value.is_contiguous(memory_format=form):
        return value
    if not value.requires_grad:
        return value.to(dtype=wanted, memory_format=form)
    return _Convert.apply(value, form, wanted)  # type: ignore[no-untyped-call]


def _leave(result: Any, dtypes: Any) -> Any:
    """Return what a stage or the model returns, with the dtypes of its boundary, and contiguous."""
    if isinstance(result, Tensor):
        return convert(result, False, next(dtypes, None))
    if isinstance(result, Mapping):
        changed = {key: _leave(value, dtypes) for key, value in result.items()}
        return type(result)(changed) if type(result) is not dict else changed  # type: ignore[call-arg]
    if isinstance(result, tuple | list):
        parts = [_leave(part, dtypes) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    if result is not None:
        next(dtypes, None)
    return result


def precision_of(execution: Execution, entered: Values) -> AbstractContextManager[Any]:
    """Return the context in which the operations of a layer have its precision."""
    if execution.precision == "fp32":
        return nullcontext()
    return torch.autocast(entered[0].device.type, dtype=torch.bfloat16)


class CastWeights:
    """Keeps the 16-bit copies of weights that autocast makes, from the first micro-batch of a step to the last.

    Autocast drops them when its outermost context ends. Each forward pass has a context of its own, and this is one
    around them.
    """

    def __init__(self) -> None:
        self._is_open = False

    def open(self) -> None:
        """Keep copies from now on."""
        self.close()
        torch.autocast_increment_nesting()
        self._is_open = True

    def close(self) -> None:
        """Drop the copies, as the weights are about to change."""
        if self._is_open:
            self._is_open = False
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()


def runs_for(
    model: Model,
    module: nn.Module,
    stop: int,
    execution: Execution,
    *,
    sums_as_they_lie: bool = True,
    leaves: bool = True,
) -> Forward:
    """Return what runs a module whose last layer is `stop - 1`: the module itself if it runs plain.

    The weights of its convolutions are put into the memory format that all ranks agree on, if they can be summed so.
    What the module returns has the dtypes and the memory format of its boundary; with `leaves` off, it stays as it is,
    for a layer that is measured among others. A model that is not shown to be a chain runs as PyTorch runs it.
    """
    if execution == PLAIN or isinstance(model.chain, Uncut):
        return module
    lay_out(module, execution.channels_last_weights and sums_as_they_lie)
    exit = model.chain.boundaries[stop]

    def run(*values: Tensor) -> Any:
        entered = tuple(convert(value, True) for value in values) if execution.channels_last else values
        with precision_of(execution, entered):
            result = module(*entered)
        return _leave(result, iter([tensor.dtype for tensor in exit.tensors])) if leaves else result

    return run


def sums_as_they_lie(ranks: Sequence[int], sync: Sync) -> bool:
    """Return whether the members of a stage may have weights in another memory format than the usual one."""
    return len(ranks) == 1 or sync.sums_as_weights_lie


def lay_out(module: nn.Module, channels_last: bool) -> None:
    """Put the weights of a module's convolutions into a memory format; they stay the same parameters."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    for part in module.modules():
        weight = part._parameters.get("weight") if isinstance(part, _CONVOLUTIONS) else None
        if weight is not None and weight.dim() == 4 and not weight.is_contiguous(memory_format=form):
            weight.data = weight.data.contiguous(memory_format=form)
