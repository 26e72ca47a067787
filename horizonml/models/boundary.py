"""Describes what crosses a cut of a model: one tensor or several, each with the batch in its first dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
