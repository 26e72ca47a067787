"""Describes what crosses a cut of a model: one tensor or several, each with the batch in its first dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from horizonml.data.tensors import TensorSpec

Values = tuple[Tensor, ...]
"""The tensors at a boundary, in the boundary's order."""


@dataclass(frozen=True)
class Boundary:
    """Describes the input of a layer."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Boundary:
        """Return the boundary that a single tensor crosses."""
        return cls((TensorSpec(tuple(shape), dtype),))

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
