"""Turns the records of a run's ranks, and the faults that were injected, into numbers; it starts nothing."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a rank's file, without the lines that a killed process left unfinished."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [record for line in lines if (record := parse(line)) is not None]


def parse(line: str) -> dict[str, Any] | None:
    """Return the record of a line, or None if a killed process left half of one there."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class Made(NamedTuple):
    """A step that a rank finished."""

    time: float  # Unix time
    rank: int  # as it was started
    generation: int
    step: int
    loss: float


@dataclass(frozen=True)
class Injected:
    """A fault as it was injected."""

    kind: str
    rank: int
    time: float  # Unix time at which it took effect
    until: float  # when it was undone; the same as `time` for one that is over at once
    detail: str = ""  # in words
    struck: bool = True  # whether the rank ended by it, if it was to


@dataclass(frozen=True)
class Aftermath:
    """What followed a fault, in seconds from the moment at which it took effect; None if it did not happen."""

    fault: Injected
    noticed: float | None  # the first survivor gave up the group, or was in a new one; None: nobody had to
    stepped: float | None  # a step was finished again, in the new group if there is one
    whole: float | None  # all ranks stepped again
    repeated: int  # steps that were done again
    generations: int  # groups that formed


@dataclass(frozen=True)
class Span:
    """A part of the run."""

    begin: float  # Unix time
    end: float

    @property
    def seconds(self) -> float:
        """Return the length of the part."""
        return self.end - self.begin


@dataclass
class _Group:
    """One generation, as the ranks' descriptions of it tell."""

    number: int
    world_size: int
    time: float  # of its first description
    ranks: set[int] = field(default_factory=set)  # as they were started


class Ledger:
    """Collects the records of all ranks, in any order, and answers questions about the run."""

    def __init__(self, ranks: int, records: Mapping[int, Iterable[Mapping[str, Any]]] | None = None) -> None:
        """Begin with the `records` of ranks, if given; `ranks` is how many there are when none is lost."""
        self.ranks = ranks
        self.groups: dict[int, _Group] = {}
        self._made: list[Made] = []
        self._sorted = True
        self._generation: dict[int, int] = {}  # of every rank, at the newest of its records
        self._given_up: list[tuple[float, int]] = []  # when which rank gave up its group
        self._batch: dict[int, int] = {}  # samples of each step
        self._steps: dict[int, set[int]] = {}  # that each generation finished
        self._losses: dict[int, tuple[float, float]] = {}  # of each step, the smallest and the largest
        for rank, lines in (records or {}).items():
            for line in lines:
                self.add(rank, line)

    def add(self, rank: int, record: Mapping[str, Any]) -> None:
        """Take in a rank's next record."""
        match record.get("kind"):
            case "run":
                number, time = int(record["generation"]), float(record["time"])
                group = self.groups.setdefault(number, _Group(number, int(record["world_size"]), time))
                group.time = min(group.time, time)
                group.ranks.add(rank)
                self._generation[rank] = number
            case "step" if rank in self._generation:
                step = int(record["step"])
                made = Made(float(record["time"]), rank, self._generation[rank], step, float(record["loss"]))
                self._batch[step] = int(record["batch"])
                self._steps.setdefault(made.generation, set()).add(step)
                low, high = self._losses.get(step, (made.loss, made.loss))
                self._losses[step] = min(low, made.loss), max(high, made.loss)
                self._sorted = self._sorted and (not self._made or made.time >= self._made[-1].time)
                self._made.append(made)
            case "end" if record.get("outcome") == "failed":
                self._given_up.append((float(record["time"]), rank))

    @property
    def made(self) -> list[Made]:
        """Return all finished steps of all ranks, in the order of time."""
        if not self._sorted:
            self._made.sort()
            self._sorted = True
        return self._made

    def between(self, begin: float, end: float) -> list[Made]:
        """Return the steps that were finished after `begin` and not after `end`."""
        first = bisect_right(self.made, begin, key=lambda made: made.time)
        last = bisect_right(self.made, end, key=lambda made: made.time)
        return self.made[first:last]

    def given_up(self, rank: int, since: float) -> float | None:
        """Return when a rank gave up its group after a time, as far as it recorded that."""
        return min((time for time, who in self._given_up if who == rank and time > since), default=None)

    def members(self) -> set[int]:
        """Return the ranks that are in the newest group."""
        return self.groups[max(self.groups)].ranks if self.groups else set()

    def whole_since(self, time: float) -> bool:
        """Return whether the newest group has all ranks, and has finished a step since a time.

        A step needs all members of a group, so no rank is asked for its own.
        """
        if not self.groups or not self.made:
            return False
        newest = self.groups[max(self.groups)]
        last = self.made[-1]
        complete = newest.world_size == len(newest.ranks) == self.ranks
        return complete and last.generation == newest.number and last.time > time

    def progress(self) -> Iterator[tuple[float, int]]:
        """Yield the samples that the state of the training has seen, over time; it falls where steps were lost."""
        total, upto = 0, [0]
        for step in range(1, max(self._batch, default=0) + 1):
            total += self._batch.get(step, 0)
            upto.append(total)
        generation, newest = -1, -1
        for made in self.made:
            if made.generation < generation or (made.generation == generation and made.step <= newest):
                continue  # another rank has recorded it before
            generation, newest = made.generation, made.step
            yield made.time, upto[made.step]

    def samples(self, span: Span, points: Sequence[tuple[float, int]] | None = None) -> int:
        """Return by how many samples the training got on in a part of the run; `points` is its `progress`."""
        points = list(self.progress()) if points is None else points
        at = [bisect_right(points, time, key=lambda point: point[0]) for time in (span.begin, span.end)]
        begin, end = (points[index - 1][1] if index else 0 for index in at)
        return end - begin

    def aftermath(self, fault: Injected, until: float) -> Aftermath:
        """Return what followed a fault; `until` is when the next one took effect, or the end."""
        known = max((group.number for group in self.groups.values() if group.time <= fault.time), default=-1)
        formed = [group for group in self.groups.values() if group.number > known and group.time <= until]
        after = self.between(fault.time, until)  # the lost rank's, too: no step is finished without the others
        if not formed:
            stepped = _longest_stop(fault, after)
            return Aftermath(fault, None, stepped, stepped, 0, 0)
        signs = [time for time, rank in self._given_up if rank != fault.rank and fault.time < time <= until]
        noticed = min([*signs, min(group.time for group in formed)]) - fault.time
        new = [made for made in after if made.generation > known]
        whole = [made for made in new if self.groups[made.generation].world_size == self.ranks]
        first_step = min((made.time for made in new), default=None)
        return Aftermath(
            fault,
            noticed,
            first_step - fault.time if first_step is not None else None,
            min(made.time for made in whole) - fault.time if whole else None,
            sum(self._repeated(group.number) for group in formed),
            len(formed),
        )

    def _repeated(self, generation: int) -> int:
        """Return how many steps a generation did that one before it had done."""
        done = max((max(steps) for number, steps in self._steps.items() if number < generation), default=0)
        return sum(step <= done for step in self._steps.get(generation, ()))

    def repeated(self) -> int:
        """Return how many steps were done again in the whole run."""
        return sum(map(self._repeated, self._steps))

    def loss_difference(self) -> float | None:
        """Return by what share the loss of a step differed, at most, between the times it was done; None if none was.

        It is 0 for a state that was recovered bit for bit and goes on by the same plan.
        """
        again = [step for step, times in Counter(chain(*self._steps.values())).items() if times > 1]
        return max((_spread(self._losses[step]) for step in again), default=None)

    def agree(self) -> bool:
        """Return whether all ranks recorded the same loss for the last step that all of them finished together."""
        losses: dict[tuple[int, int], dict[int, float]] = {}
        for made in self.made:
            losses.setdefault((made.generation, made.step), {})[made.rank] = made.loss
        common = [place for place, by_rank in losses.items() if len(by_rank) == self.ranks]
        return bool(common) and _spread(losses[max(common)].values()) < 1e-6


def _longest_stop(fault: Injected, after: Sequence[Made]) -> float | None:
    """Return how long the others stood still, at most, during a fault that broke no group; None if for good."""
    if not after:
        return None
    times = [fault.time, *(made.time for made in after)]
    return max(end - begin for begin, end in pairwise(times) if begin <= fault.until)


def _spread(values: Collection[float]) -> float:
    """Return how far the smallest and the largest value are apart, as a share of the largest."""
    largest = max(map(abs, values))
    return (max(values) - min(values)) / largest if largest else 0.0
