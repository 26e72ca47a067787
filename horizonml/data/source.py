"""Provides images and labels before they are normalised."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Source(Protocol):
    """Provides images and labels by index, counted from 0."""

    def __len__(self) -> int: ...

    def images(self, indices: Tensor) -> Tensor:
        """Return uint8 pixels, or float32 values that are already normalised, `[n, channels, height, width]`."""

    def labels(self, indices: Tensor) -> Tensor:
        """Return the classes, int64 `[n]`."""


class ArraySource:
    """Holds a data set in memory; with `wrap`, indices beyond its end start over."""

    def __init__(self, images: Tensor | None, labels: Tensor | None, wrap: bool = False) -> None:
        assert images is None or labels is None or len(images) == len(labels)
        self._images, self._labels, self._wrap = images, labels, wrap
        self._length = len(images) if images is not None else 0

    def keep(self, images: bool, labels: bool) -> None:
        """Free the images or the labels that are not wanted."""
        self._images = self._images if images else None
        self._labels = self._labels if labels else None

    def __len__(self) -> int:
        return self._length

    def images(self, indices: Tensor) -> Tensor:
        """Return the pixels or values as they were given, `[n, channels, height, width]`."""
        assert self._images is not None, "this rank has no images"
        return self._images[indices % len(self) if self._wrap else indices]

    def labels(self, indices: Tensor) -> Tensor:
        """Return the classes, int64 `[n]`."""
        assert self._labels is not None, "this rank has no labels"
        return self._labels[indices % len(self) if self._wrap else indices]
