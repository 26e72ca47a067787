"""Says which rows of a batch a rank will ask for, so that they can be loaded ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Range = tuple[int, int]

_MOST_ROWS = 16  # of a chunk


@dataclass(frozen=True)
class Needs:
    """Says which rows of a batch a rank asks for, as ranges of `start` to `stop - 1`."""

    inputs: Sequence[Range] = ()
    targets: Sequence[Range] = ()

    def chunks(self, workers: int) -> list[tuple[int, int, bool, bool]]:
        """Return the chunks to read, as `start`, `stop`, and whether their inputs and their targets are needed.

        They are in the order in which the rows are asked for, and small enough for all workers to have some.
        """
        ranges = [*self.inputs, *self.targets]
        total = sum(stop - start for start, stop in ranges)
        size = max(1, min(_MOST_ROWS, -(-total // max(1, 2 * workers)))) if workers else total
        edges = sorted({edge for one in ranges for edge in one})
        found: list[tuple[int, int, bool, bool]] = []
        for begin, end in pairwise(edges):
            inputs, targets = (_covers(ranges, begin) for ranges in (self.inputs, self.targets))
            if inputs or targets:
                found += [(row, min(row + size, end), inputs, targets) for row in range(begin, end, size)]
        return found


def _covers(ranges: Sequence[Range], row: int) -> bool:
    return any(start <= row < stop for start, stop in ranges)
