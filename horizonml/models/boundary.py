"""Describes a model's layers, and what crosses a cut between two: tensors with the batch in their first dimension.

There are two ways to find layers. `Chain` cuts a recorded graph between any two operations: for models of plain
operations, and for tensor parallelism, which needs the graph. `Structure` cuts between calls of modules: for models
whose forward branches, such as those of transformers. `Uncut` is a model that is cut in neither way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from horizonml.data.dataset import TensorSpec
from horizonml.errors import ModelError
from horizonml.machine.code import where
from horizonml.tasks.task import InputSpec

Values = tuple[Tensor, ...]
"""The tensors at a boundary, in the boundary's order."""


@dataclass(frozen=True)
class Boundary:
    """Describes the input of a layer."""

    tensors: tuple[TensorSpec, ...]

    @property
    def bytes_per_sample(self) -> int:
        """Return the size of all tensors of one sample in bytes."""
        return sum(tensor.bytes_per_sample for tensor in self.tensors)

    @property
    def gradients(self) -> Boundary:
        """Return the boundary that gradients cross on their way back."""
        return Boundary(tuple(tensor for tensor in self.tensors if tensor.differentiable))

    def example(self, rows: int, needs_gradient: bool = False) -> Values:
        """Return `rows` synthetic samples to measure with."""
        return tuple(tensor.example(rows, needs_gradient) for tensor in self.tensors)

    def zeros(self, rows: int) -> Values:
        """Return `rows` samples of zeros."""
        return tuple(torch.zeros(rows, *tensor.shape, dtype=tensor.dtype) for tensor in self.tensors)

    def leaves(self, values: Values, needs_gradient: bool) -> Values:
        """Return tensors that have arrived as the leaves of a graph of their own."""
        return tuple(
            value.requires_grad_(needs_gradient and tensor.differentiable)
            for tensor, value in zip(self.tensors, values, strict=True)
        )

    def differentiable(self, values: Values) -> Values:
        """Return those of the tensors whose gradients travel back."""
        return tuple(value for tensor, value in zip(self.tensors, values, strict=True) if tensor.differentiable)


class Layers(ABC):
    """Holds a model's layers in order.

    `names[i]` is the name of layer `i`; `boundaries[i]` describes its input, and the last entry of `boundaries`
    describes the model's output. `len(layers)` is the number of layers, so there are `len(layers) - 1` cut points.
    """

    names: list[str]
    boundaries: list[Boundary]
    spare: tuple[str, ...] = ()  # tensors that the forward never uses; the last layer keeps them
    _stops: list[int]  # the number of the operation, or of the call, after each layer

    def __len__(self) -> int:
        return len(self._stops)

    @abstractmethod
    def slice(self, start: int, stop: int) -> nn.Module:
        """Return layers `start` to `stop - 1` as a module that takes the tensors of boundary `start` one by one.

        It returns the tensor of boundary `stop`, or a tuple if there are several; the last layer returns what the
        model returns. The module shares the model's tensors, and has its names for them.
        """

    @abstractmethod
    def bond(self, index: int) -> str | None:
        """Return what keeps a layer from being cut, as a part of a sentence, or None if nothing is known to."""

    @abstractmethod
    def report(self) -> str:
        """Return a sentence about what could not be cut or has no part in the training, or an empty one."""

    def _span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the numbers of the first operation, or call, of these layers, and of the one after the last."""
        assert 0 <= start < stop <= len(self), (start, stop, len(self))
        return self._stops[start - 1] if start else 0, self._stops[stop - 1]


def unique_names(layers: Iterable[tuple[Sequence[str], str, str]]) -> list[str]:
    """Return a name for each layer: what the paths of its modules have in common, or else its second entry.

    The third entry tells apart layers of the same name.
    """
    names: list[str] = []
    for paths, instead, suffix in layers:
        common: list[str] = []
        for parts in zip(*(path.split(".") for path in paths), strict=False):
            if len(set(parts)) != 1:
                break
            common.append(parts[0])
        name = ".".join(common) or instead
        names.append(f"{name}.{suffix}" if name in names else name)
    return names


def output_boundary(model: nn.Module, specs: Sequence[TensorSpec | None]) -> Boundary:
    """Return the boundary at a model's end; None stands for what is no tensor with the batch first.

    Raises ModelError if there is such a thing, or nothing at all.
    """
    found = tuple(spec for spec in specs if spec is not None)
    if not found or len(found) < len(specs):
        raise ModelError(f"{type(model).__name__} does not return tensors with the batch in their first dimension")
    return Boundary(found)


def per_sample(one: TensorSpec, two: TensorSpec, sizes: tuple[int, int] = (1, 2)) -> TensorSpec | None:
    """Return what batches of two sizes have in common if they differ in their first dimension only, or None.

    The shapes of `one` and `two` include the batch.
    """
    same = one.dtype == two.dtype and one.shape[1:] == two.shape[1:]
    return TensorSpec(one.shape[1:], one.dtype) if same and (*one.shape[:1], *two.shape[:1]) == sizes else None


def seen(tensor: Tensor) -> TensorSpec:
    """Return the description of a tensor with the batch as part of its shape, for `per_sample`."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def refused(
    model: nn.Module, input: InputSpec, error: Exception, verb: str = "does not accept inputs", at: str = ""
) -> ModelError:
    """Return the error for what a model's own code has raised on inputs of this kind; `at` says in which operation."""
    shapes = " and ".join(str(list(tensor.shape)) for tensor in input.tensors)
    return ModelError(f"{type(model).__name__} {verb} of shape {shapes}{at}: {where(error)}. {input.advice}".rstrip())


def arguments(inputs: Sequence[Any], names: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, object]]:
    """Return the arguments of a model's forward for these inputs."""
    return ((), dict(zip(names, inputs, strict=True))) if names else (tuple(inputs), {})


def run_on_zeros(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what a module returns with zeros for its parameters and buffers, which may have no memory themselves."""
    zeros = {
        name: torch.zeros(tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    return torch.func.functional_call(module, zeros, args, kwargs)


@torch.no_grad()
def depends_on_rows(parts: Sequence[nn.Module], inputs: Values) -> int | None:
    """Return the first part that needs rows of the batch in the order in which they were together before, or None.

    A model may order rows by their length, say, and put them back at its end. Members of a stage order their own rows
    only, so a stage with other members finds rows where it does not expect them. What depends on the whole batch in any
    case, such as a mean, is none of this.
    """
    half = len(inputs[0]) // 2
    together, alone = inputs, [tuple(value[:half] for value in inputs), tuple(value[half:] for value in inputs)]
    apart: list[tuple[int, Values]] = []
    for index, part in enumerate(parts):
        together, *alone = (flat(part.eval()(*values)) for values in (together, *alone))
        put = tuple(map(torch.cat, zip(*alone, strict=True)))
        if not _are_close(together, put):
            apart.append((index + 1, put))
    if apart and apart[-1][0] == len(parts):
        return None
    for index, values in apart:
        for part in parts[index:]:
            values = flat(part(*values))
        if not _are_close(together, values):
            return index
    return None


def _are_close(some: Values, others: Values) -> bool:
    return all(
        torch.allclose(one, other, 1e-3, 1e-4 * max(1e-3, float(one.abs().max())), equal_nan=True)
        if one.is_floating_point()
        else torch.equal(one, other)
        for one, other in zip(some, others, strict=True)
    )


def values_of(result: Tensor | Values) -> Values:
    """Return what a layer returns as a tuple; a layer with one output returns the bare tensor."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def flat(result: Any) -> tuple[Any, ...]:
    """Return the leaves of what a model returns: a tensor, or a nesting of mappings and sequences of tensors."""
    if isinstance(result, Mapping):
        result = tuple(result.values())
    if isinstance(result, tuple | list):
        return tuple(leaf for part in result for leaf in flat(part))
    return (result,)


def tensors_of(result: Any) -> Values:
    """Return the tensors in what a model, or an operation of it, returns."""
    return tuple(value for value in flat(result) if isinstance(value, Tensor))
