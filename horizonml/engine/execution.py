"""Runs the layers of a stage, each in the memory format and the precision that was chosen for it.

Consecutive layers that run in the same way form a run. A run has a graph of its own, whose modules are those of the
stage, so that names, parameters, buffers and hooks stay as they are. A model that a rank holds whole runs by its own
code, in one way. Tensors are converted where they pass from one run
to another, and what leaves the stage has the dtype and the memory format of the boundary.

With bf16, `torch.autocast` computes matrix products and convolutions in 16 bits from float32 parameters. Their
gradients become float32 where they leave the graph, so all sums over micro-batches and members are in float32.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from horizonml.models.boundary import Boundary, Layers, Values, values_of
from horizonml.models.chain import Chain
from horizonml.models.cutting import Uncut, WholeModule
from horizonml.models.zoo import Model
from horizonml.plan.execution import PLAIN, Execution, Executions, Run
from horizonml.plan.plan import Sync

_log = logging.getLogger(__name__)
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


class Runs:
    """Computes what a stage's module computes, run by run."""

    def __init__(
        self, parts: Sequence[tuple[Execution, Forward]], exit: Boundary | None, before: Execution = PLAIN
    ) -> None:
        """Take the runs in order, and how what enters the first has run.

        `exit` describes what leaves the last one, or is None to let it leave as it is.
        """
        self._parts, self._exit, self._before = parts, exit, before

    def __call__(self, *values: Tensor) -> Any:
        """Return what the module returns for the tensors of its boundary."""
        result: Any = values
        before = self._before
        for execution, forward in self._parts:
            entered = values_of(result)
            if execution.channels_last or before != PLAIN:
                entered = tuple(_enter(value, before, execution) for value in entered)
            with precision_of(execution, entered):
                result = forward(*entered)
            before = execution
        if self._exit is None or before == PLAIN:
            return result
        return _leave(result, iter([tensor.dtype for tensor in self._exit.tensors]))


def _enter(value: Tensor, before: Execution, execution: Execution) -> Tensor:
    narrow = value.dtype == torch.bfloat16 and before.precision == "bf16" and execution.precision != "bf16"
    converted: Tensor = convert(value, execution.channels_last, torch.float32 if narrow else None)
    return converted


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

    Autocast drops them when its outermost context ends. Each run has a context of its own, and this is one around them.
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
    start: int,
    stop: int,
    executions: Executions | None,
    *,
    before: Sequence[Execution] = (),
    sums_as_they_lie: bool = True,
) -> Forward:
    """Return what runs a module that is layers `start` to `stop - 1`: the module itself if all of them are plain.

    The weights of its convolutions are put into the memory format that all ranks agree on, if they can be summed so.
    With the execution `before` these layers, they are measured in a row: their inputs come from a layer that runs so,
    and their outputs leave as they are.
    """
    if executions is None or executions.plain:
        return module
    layers, weights = model.chain, executions.channels_last_weights if sums_as_they_lie else frozenset()
    lay_out(module, {name for name, layer in model.parameter_names().items() if layer in weights})
    divides = isinstance(layers, Chain) and not isinstance(module, WholeModule)
    found = executions.runs(start, stop) if divides else [_uniform(executions, start, stop, layers)]
    if all(execution == PLAIN for execution in (*before, *(run.execution for run in found))):
        return module
    parts: list[tuple[Execution, Forward]] = []
    for first, last, execution in found:
        part = layers.slice(first, last, module) if isinstance(layers, Chain) and len(found) > 1 else module
        parts.append((execution, part))
    return Runs(parts, None if before else layers.boundaries[stop], *before)


def sums_as_they_lie(ranks: Sequence[int], sync: Sync) -> bool:
    """Return whether the members of a stage may have weights in another memory format than the usual one."""
    return len(ranks) == 1 or sync.sums_as_weights_lie


def _uniform(executions: Executions, start: int, stop: int, layers: Layers) -> Run:
    """Return layers as one run, in the way that most of them run best.

    Code that runs as its author wrote it runs as a whole in one way. A model that is not shown to be a chain runs as
    PyTorch runs it.
    """
    if isinstance(layers, Uncut):
        return Run(start, stop, PLAIN)
    ((usual, _),) = Counter(executions.layers[start:stop]).most_common(1)
    return Run(start, stop, usual)


def lay_out(module: nn.Module, channels_last: Collection[str]) -> None:
    """Put the weights of a module's convolutions into a memory format, by name; they stay the same parameters."""
    for name, part in module.named_modules():
        weight = part._parameters.get("weight") if isinstance(part, _CONVOLUTIONS) else None
        if weight is None or weight.dim() != 4:
            continue
        form = torch.channels_last if f"{name}.weight" in channels_last else torch.contiguous_format
        if not weight.is_contiguous(memory_format=form):
            weight.data = weight.data.contiguous(memory_format=form)
