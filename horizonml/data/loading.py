"""Loads the rows of the next batches while a step computes, within a bound of memory.

A rank knows which rows of a batch it will ask for, as they follow from the plan. They are cut into chunks, which
workers read in the order in which they are needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from horizonml.data.dataset import (
    Batch,
    DataBatch,
    DataInfo,
    Inputs,
    NeededRows,
    Range,
    Rows,
    Tree,
    WholeSamples,
    sample_bytes,
)
from horizonml.data.own import OwnSplit
from horizonml.data.samples import join, join_inputs, rows_of
from horizonml.data.workers import PendingRows, Workers


@dataclass
class _Chunk:
    """Holds some rows of a batch that a worker reads."""

    start: int
    stop: int
    has_inputs: bool
    has_targets: bool
    bytes: int
    pending: PendingRows | None = None  # None until a worker may read it

    def take(self, inputs: bool) -> Tree:
        """Return the inputs, which are then forgotten, or the targets. Raises what reading them raised."""
        assert self.pending is not None
        rows = self.pending.rows()
        if not inputs:
            assert rows.targets is not None
            return rows.targets
        assert rows.inputs is not None
        kept = Rows(None, rows.targets)
        self.has_inputs, self.pending = False, PendingRows(lambda: kept)
        return list(rows.inputs) if isinstance(rows.inputs, tuple) else rows.inputs


class LoadedBatch:
    """Implements `Batch` with rows that workers read."""

    def __init__(self, source: DataBatch, chunks: list[_Chunk], workers: Workers) -> None:
        self.skipped, self.source, self.chunks, self._workers = source.skipped, source, chunks, workers
        self.waits = workers.count > 0

    @property
    def size(self) -> int:
        """Return the number of samples in the global batch."""
        return self.source.size

    def begin(self, chunk: _Chunk) -> None:
        """Hand a chunk to the workers."""
        if chunk.pending is None:
            chunk.pending = self._workers.read(
                self.source, chunk.start, chunk.stop, chunk.has_inputs, chunk.has_targets
            )

    def drop(self) -> None:
        """Forget the rows, and give up those that nobody has begun to read."""
        for chunk in self.chunks:
            if chunk.pending is not None:
                chunk.pending.cancel()
        self.chunks = []

    def inputs(self, start: int, stop: int) -> Inputs:
        """Return the inputs of rows `start` to `stop - 1`. Raises what reading them raised."""
        found = self._collect(start, stop, True)
        return self.source.inputs(start, stop) if found is None else join_inputs(found)

    def targets(self, start: int, stop: int) -> Tree:
        """Return the targets of rows `start` to `stop - 1`. Raises what reading them raised."""
        found = self._collect(start, stop, False)
        return self.source.targets(start, stop) if found is None else join(found)

    def _collect(self, start: int, stop: int, inputs: bool) -> list[Tree] | None:
        """Return the parts of the rows in their order; None if these rows were not planned."""
        found: list[Tree] = []
        row = start
        for chunk in self.chunks:
            if row >= stop or not chunk.start <= row < chunk.stop:
                continue
            if not (chunk.has_inputs if inputs else chunk.has_targets):
                return None
            until = min(stop, chunk.stop)
            if inputs and (row, until) != (chunk.start, chunk.stop):
                return None
            self.begin(chunk)
            found.append(rows_of(chunk.take(inputs), row - chunk.start, until - chunk.start))
            row = until
        return found if row >= stop else None


class Ahead(Sequence[Batch]):
    """Provides batches one after another, and has workers load the next ones meanwhile."""

    def __init__(
        self,
        batches: Callable[[int], DataBatch],
        numbers: range,
        needs: Callable[[int, int], NeededRows],
        workers: Workers,
        info: DataInfo,
        prefetch: int,
        memory: int,
    ) -> None:
        """`batches` returns the batch of a number of `numbers`, and `needs` the rows asked for of it, given its size.

        At most `prefetch` batches are loaded ahead of the one that was taken last, and at most `memory` bytes. Without
        workers, batches read their rows themselves.
        """
        self._batches, self._numbers, self._needs, self._workers = batches, numbers, needs, workers
        self._prefetch, self._memory = prefetch if workers.count else 0, memory
        self._input_bytes, self._target_bytes = sample_bytes(info)
        self._planned: deque[tuple[int, LoadedBatch]] = deque()
        self._cuts: dict[tuple[tuple[Range, ...], ...], list[tuple[int, int, bool, bool]]] = {}  # by the rows asked for

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> Batch: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Batch]: ...

    def __getitem__(self, place: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(place, slice):
            return [self[one] for one in range(len(self))[place]]
        return self.take(self._numbers[place])

    def __iter__(self) -> Iterator[Batch]:
        return (self.take(number) for number in self._numbers)

    def take(self, number: int) -> LoadedBatch | DataBatch:
        """Return a batch, whose rows may be there already; those of earlier batches are dropped."""
        if not self._workers.count:
            source = self._batches(number)
            # Whole samples are read once for inputs and targets.
            return self._plan(source, number) if isinstance(source.split, WholeSamples) else source
        while self._planned and self._planned[0][0] != number:
            self._planned.popleft()[1].drop()
        last = min(number + self._prefetch, self._numbers.stop - 1)
        next_ = self._planned[-1][0] + 1 if self._planned else number
        self._planned.extend((one, self._plan(self._batches(one), one)) for one in range(next_, last + 1))
        self._expect(number)
        (_, taken), *ahead = self._planned
        for chunk in taken.chunks:
            taken.begin(chunk)
        room = self._memory
        for _, batch in ahead:
            for chunk in batch.chunks:
                room -= chunk.bytes
                if room < 0:
                    return taken
                batch.begin(chunk)
        return taken

    def _plan(self, source: DataBatch, number: int) -> LoadedBatch:
        needed = self._needs(source.size, number)
        key = tuple(needed.inputs), tuple(needed.targets)
        if key not in self._cuts:
            self._cuts[key] = needed.chunks(self._workers.count)
        chunks = [
            _Chunk(start, stop, inputs, targets, (stop - start) * self._bytes(inputs, targets))
            for start, stop, inputs, targets in self._cuts[key]
        ]
        return LoadedBatch(source, chunks, self._workers)

    def _expect(self, number: int) -> None:
        """Tell a data set that fetches samples in shards which of them are needed before long."""
        batch = self._planned[0][1].source
        reach = batch.split.reach if isinstance(batch.split, OwnSplit) else 0
        far = number + -(-reach // batch.size)
        if reach and far in self._numbers:
            later = self._batches(far)
            assert isinstance(later.split, OwnSplit)
            later.split.expect(later.indices)

    def _bytes(self, inputs: bool, targets: bool) -> int:
        return inputs * self._input_bytes + targets * self._target_bytes

    def close(self) -> None:
        """Forget all batches, and give up what nobody has begun to read."""
        while self._planned:
            self._planned.pop()[1].drop()
