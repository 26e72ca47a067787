"""Presents rows of one or several global batches as a batch of their own, on which a single replica trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from horizonml.data.dataset import Batch, BatchOfWorkers, Inputs, Tree
from horizonml.data.samples import join


@dataclass(frozen=True)
class Part:
    """Describes rows `start` to `stop - 1` of a batch."""

    batch: Batch
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Return the number of rows."""
        return self.stop - self.start


class Rows:
    """Implements `Batch` for parts of other batches, one after another."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = [part for part in parts if part.size]

    @property
    def size(self) -> int:
        """Return the number of rows of all parts."""
        return sum(part.size for part in self._parts)

    @property
    def waits(self) -> bool:
        """Return whether workers load any of the rows; see `BatchOfWorkers`."""
        return any(isinstance(part.batch, BatchOfWorkers) and part.batch.waits for part in self._parts)

    def inputs(self, start: int, stop: int) -> Inputs:
        """Return the inputs of rows `start` to `stop - 1`."""
        found = self._collect(start, stop, lambda part, first, end: part.batch.inputs(first, end))
        joined = join([list(tree) if isinstance(tree, tuple) else tree for tree in found])
        if isinstance(joined, Tensor):
            return joined
        return tuple(part for part in joined if isinstance(part, Tensor))

    def targets(self, start: int, stop: int) -> Tree:
        """Return the targets of rows `start` to `stop - 1`."""
        return join(self._collect(start, stop, lambda part, first, end: part.batch.targets(first, end)))

    def _collect(self, start: int, stop: int, read: Callable[[Part, int, int], Tree]) -> list[Tree]:
        found, before = [], 0
        for part in self._parts:
            first, end = max(start - before, 0), min(stop - before, part.size)
            if first < end:
                found.append(read(part, part.start + first, part.start + end))
            before += part.size
        return found

    def split(self, pieces: int) -> list[Rows]:
        """Return the rows in so many pieces of about the same size, without those that would be empty."""
        edges = [self.size * number // pieces for number in range(pieces + 1)]
        return [self._between(first, end) for first, end in pairwise(edges) if first < end]

    def _between(self, start: int, stop: int) -> Rows:
        parts, before = [], 0
        for part in self._parts:
            first, end = max(start - before, 0), min(stop - before, part.size)
            if first < end:
                parts.append(Part(part.batch, part.start + first, part.start + end))
            before += part.size
        return Rows(parts)
