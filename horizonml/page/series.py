"""Holds values over the steps of a run in a bounded number of points: the longer the run, the coarser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_POINTS = 1500


@dataclass
class _Bucket:
    """Sums up the values of some steps that follow each other."""

    first: int
    last: int
    sums: list[float]
    counts: list[int]

    def add(self, other: _Bucket) -> None:
        """Take up the steps of another bucket, which come later."""
        self.last = other.last
        self.sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]

    def point(self) -> list[float | None]:
        """Return the last step, and the mean of each value that was known."""
        means = (total / number if number else None for total, number in zip(self.sums, self.counts, strict=True))
        return [self.last, *(None if mean is None else float(f"{mean:.6g}") for mean in means)]


class Series:
    """Holds the means of several values over buckets of steps.

    `revision` changes whenever points other than the newest one do, so that a client that has the others must ask for
    all of them again.
    """

    def __init__(self, columns: int, most: int = MOST_POINTS) -> None:
        self._columns, self._most, self._stride = columns, most, 1
        self._buckets: list[_Bucket] = []
        self.revision = 0

    def add(self, step: int, values: Sequence[float | None]) -> None:
        """Add a step; those that were done before from its number on are done again, and no longer count."""
        assert len(values) == self._columns
        while self._buckets and self._buckets[-1].first >= step:
            self._buckets.pop()
            self.revision += 1
        known = [value is not None and math.isfinite(value) for value in values]
        sums = [value if fine and value is not None else 0.0 for value, fine in zip(values, known, strict=True)]
        new = _Bucket(step, step, sums, list(map(int, known)))
        newest = self._buckets[-1] if self._buckets else None
        if newest is None or (newest.first - 1) // self._stride != (step - 1) // self._stride:
            self._buckets.append(new)
        else:
            newest.add(new)
        if len(self._buckets) > self._most:
            self._halve()

    def _halve(self) -> None:
        """Join neighbours until there is room again."""
        self.revision += 1
        while len(self._buckets) > self._most:
            self._stride *= 2
            merged: list[_Bucket] = []
            for bucket in self._buckets:
                if merged and (merged[-1].first - 1) // self._stride == (bucket.first - 1) // self._stride:
                    merged[-1].add(bucket)
                else:
                    merged.append(bucket)
            self._buckets = merged

    def since(self, step: int) -> list[list[float | None]]:
        """Return the points whose last step is `step` or a later one."""
        start = len(self._buckets)
        while start and self._buckets[start - 1].last >= step:
            start -= 1
        return [bucket.point() for bucket in self._buckets[start:]]
