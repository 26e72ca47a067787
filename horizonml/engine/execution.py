"""Runs the layers of a stage as this device has chosen, and their backward pass, whole or split in two.

What enters the stage is converted to its memory format, and what leaves it has the dtypes of the boundary and the usual
memory format.

With bf16, `torch.autocast` computes matrix products and convolutions in 16 bits from float32 parameters. Their
gradients become float32 where they leave the graph, so all sums over micro-batches and members are in float32.

A split pass computes first the gradient of the stage's input, for which the previous stage waits, and later the
gradients of the stage's weights, which can fill time in which this stage would be idle (Zero Bubble Pipeline
Parallelism; Qi et al., ICLR 2024).

Autograd's graph is cut where a weight joins the path from the output to the input. The operation there (a convolution
or a matrix product) receives the gradient of its result in the first part; this gradient is kept, and the second part
computes the gradient of the weight from it. The gradients of vectors (biases, the parameters of normalisations) cost
next to nothing and are computed in the first part.

When `torch.autograd.backward` in torch 2.13 is given a gradient, it imports sympy, which costs every rank outside the
last stage 34 MB and a quarter of a second. It does not import sympy when it starts from a scalar, so that is how a pass
starts here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import (
    GradientEdge,
    Node,
    _engine_run_backward,  # torch.autograd.backward would import sympy, see `backward`
    get_gradient_edge,
)

from horizonml.models.boundary import Values
from horizonml.models.cutting import Uncut
from horizonml.models.zoo import Model
from horizonml.plan.plan import PLAIN, Execution, Sync

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


@dataclass
class _Join:
    """Describes an operation at which weights join the path, and the gradients of its results."""

    node: Node
    weights: list[Tensor]
    gradients: tuple[Tensor | None, ...] = ()

    def keep(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.gradients = gradients


@dataclass
class SplitBackward:
    """Runs the backward pass of one micro-batch: `input_part` first, and `weight_part` at any later time."""

    outputs: Values
    gradients: Values | None  # of the outputs; None if the only one is a loss
    entered: Values | None  # the stage's inputs that want gradients; None for a first stage, which sends none
    _joins: list[_Join] = field(default_factory=list)

    def input_part(self) -> None:
        """Compute the gradients of the inputs, and those of the parameters that cost next to nothing."""
        if self.entered is None or not self.outputs:
            return
        start = seeded(self.outputs, self.gradients)
        assert start.grad_fn is not None
        self._joins, others = _find_joins(start.grad_fn, self.entered)
        handles = [join.node.register_prehook(join.keep) for join in self._joins]
        try:
            torch.autograd.backward(start, inputs=[*self.entered, *others], retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()

    @property
    def pending(self) -> list[Tensor] | None:
        """The weights whose gradients `weight_part` computes; None if it computes those of all parameters."""
        return None if self.entered is None else [weight for join in self._joins for weight in join.weights]

    def weight_part(self) -> None:
        """Compute the gradients that are still missing."""
        if self.entered is None:
            if self.outputs:
                backward(self.outputs, self.gradients)
            return
        for join in self._joins:
            given = [(place, gradient) for place, gradient in enumerate(join.gradients) if gradient is not None]
            if given:
                edges = tuple(GradientEdge(join.node, place) for place, _ in given)
                gradients = tuple(gradient for _, gradient in given)
                # The path from here to the input is not run, because none of these weights lies on it.
                _engine_run_backward(
                    edges, gradients, False, False, tuple(join.weights), allow_unreachable=True, accumulate_grad=True
                )
        self._joins = []


def _find_joins(root: Node, entered: Values) -> tuple[list[_Join], list[Tensor]]:
    """Return the joins between `root` and the inputs, and the parameters whose gradients the first part computes.

    A weight that joins at several places is among these parameters, because the path from one place leads to the other.
    All parameters are if nothing leads from `root` to the inputs, as where a stage detaches what it has received.
    """
    order = _topological(root)
    targets = {get_gradient_edge(one).node for one in entered}
    on_path = set(targets)
    for node in order:  # starting at the inputs
        if any(child in on_path for child, _ in node.next_functions):
            on_path.add(node)
    if root not in on_path:
        return [], _leaves(root)
    reached: dict[Node, list[Tensor]] = {}
    for node in order:
        if node in on_path and node not in targets:
            branches = [child for child, _ in node.next_functions if child is not None and child not in on_path]
            reached[node] = [leaf for branch in branches for leaf in _leaves(branch)]
    places: dict[int, int] = {}
    for leaves in reached.values():
        for leaf in leaves:
            places[id(leaf)] = places.get(id(leaf), 0) + 1
    joins: list[_Join] = []
    others: dict[int, Tensor] = {}
    for node, leaves in reached.items():
        weights = [leaf for leaf in leaves if leaf.dim() > 1 and places[id(leaf)] == 1]
        others |= {id(leaf): leaf for leaf in leaves if leaf.dim() <= 1 or places[id(leaf)] > 1}
        if weights:
            joins.append(_Join(node, weights))
    return joins, list(others.values())


def _topological(root: Node) -> list[Node]:
    """Return the nodes that can be reached from `root`, each after all the nodes that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return order


def _leaves(branch: Node) -> list[Tensor]:
    """Return the parameters at the ends of a branch."""
    return [node.variable for node in _topological(branch) if hasattr(node, "variable")]


class _Seed(torch.autograd.Function):
    """Makes a scalar whose gradients with respect to the `outputs` are the `gradients`."""

    @staticmethod
    def forward(ctx: Any, gradients: Values, *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *ones: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.gradients)


def seeded(outputs: Values, gradients: Values | None) -> Tensor:
    """Return a scalar from which to start a backward pass.

    Each gradient has the shape of its output; there are none if the only output is a loss.
    """
    if gradients is None:
        (loss,) = outputs
        return loss
    number: Tensor = _Seed.apply(gradients, *outputs)  # type: ignore[no-untyped-call]
    return number


def backward(outputs: Values, gradients: Values | None) -> None:
    """Compute the gradients of all leaves from those of the `outputs`; there are none if the only output is a loss."""
    torch.autograd.backward(seeded(outputs, gradients))
