"""Describes tensors that have the batch in their first dimension, without having them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_NAMES = ("float16", "bfloat16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64")
DTYPES: frozenset[torch.dtype] = frozenset(getattr(torch, name) for name in _NAMES)

_MOST_VALUES = 1 << 32  # of one sample
_MOST_DIMENSIONS = 16


def whole(value: Any, most: int) -> int:
    """Return a whole number from 0 to `most`, which may come from elsewhere. Raises ValueError."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{ascii(value)[:60]} is not a whole number from 0 to {most}")
    return value


@dataclass(frozen=True)
class TensorSpec:
    """Describes a tensor: its shape without the batch dimension, its dtype, and whether its gradient travels back."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    differentiable: bool = True

    @property
    def values_per_sample(self) -> int:
        """Return how many values one sample has."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def bytes_per_sample(self) -> int:
        """Return the size of one sample in bytes."""
        return self.values_per_sample * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        """Return plain JSON values."""
        return [list(self.shape), str(self.dtype).removeprefix("torch.")]

    @classmethod
    def from_json(cls, value: Any) -> TensorSpec:
        """Return the description from which `to_json` made `value`. Raises ValueError."""
        shape, name = value
        dtype = getattr(torch, name) if name in _NAMES else None
        if dtype is None:
            raise ValueError(f"{name!r} is not the dtype of a tensor")
        found = cls(tuple(whole(extent, _MOST_VALUES) for extent in shape), dtype)
        if len(found.shape) > _MOST_DIMENSIONS or found.values_per_sample > _MOST_VALUES:
            raise ValueError(f"a sample of shape {list(found.shape)[:_MOST_DIMENSIONS]} is too large")
        return found

    def example(self, rows: int, needs_gradient: bool = False) -> Tensor:
        """Return `rows` synthetic samples to measure with: noise, or zeros for a dtype that is not floating-point."""
        shape = (rows, *self.shape)
        if not self.dtype.is_floating_point:
            return torch.zeros(shape, dtype=self.dtype)
        return torch.randn(shape, dtype=self.dtype, requires_grad=needs_gradient and self.differentiable)
