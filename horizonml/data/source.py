"""Where images and labels come from, before they are normalised."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Source(Protocol):
    """Images and labels by index."""

    def __len__(self) -> int: ...

    def images(self, indices: Tensor) -> Tensor:
        """uint8 pixels, or float32 values that are already normalised, `[n, channels, height, width]`."""

    def labels(self, indices: Tensor) -> Tensor:
        """Classes, int64 `[n]`."""


class ArraySource:
    """A data set in memory. With `wrap`, indices beyond its end start over."""

    def __init__(self, images: Tensor, labels: Tensor, wrap: bool = False) -> None:
        assert len(images) == len(labels)
        self._images, self._labels, self._wrap = images, labels, wrap

    def __len__(self) -> int:
        return len(self._labels)

    def images(self, indices: Tensor) -> Tensor:
        return self._images[indices % len(self) if self._wrap else indices]

    def labels(self, indices: Tensor) -> Tensor:
        return self._labels[indices % len(self) if self._wrap else indices]
