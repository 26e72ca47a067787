"""Says which rows of a batch a rank will ask for, so that they can be loaded ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from horizonml.data.dataset import DataInfo
from horizonml.data.spec import DataSpec

Range = tuple[int, int]

_MOST_ROWS = 16  # of a chunk
_UNKNOWN_BYTES = 64  # of a target, where the description of the data does not tell


@dataclass(frozen=True)
class NeededRows:
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


def loads_ahead(spec: DataSpec) -> bool:
    """Return whether ranks load samples of the next steps while a step computes.

    By itself, that is where reading a sample takes work: it is decoded, fetched, or made by code of the user's own.
    """
    return spec.source.decodes if spec.workers == "auto" else spec.workers > 0


def sample_bytes(info: DataInfo) -> tuple[int, int]:
    """Return the bytes of the inputs and of the targets of a sample."""
    targets = info.target.bytes_per_sample if info.target is not None else _UNKNOWN_BYTES
    return sum(spec.bytes_per_sample for spec in info.inputs), targets


def _covers(ranges: Sequence[Range], row: int) -> bool:
    return any(start <= row < stop for start, stop in ranges)
