"""Holds what is known of a run while it trains: of its ranks, of its loss over time, and of what has happened."""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from horizonml.engine.clock import KINDS, Kind
from horizonml.telemetry.fields import Record
from horizonml.telemetry.record import EndRecord, StepRecord, TimelineRecord
from horizonml.telemetry.run_info import RunInfo
from horizonml.text import printable

WINDOW = 20  # steps over which speeds and shares are averaged
MOST_POINTS = 1500
_MOST_TIMELINES = 2  # of each rank
MOST_NAME = 64  # characters of a device's name
_revisions = itertools.count(1)


class RunState(StrEnum):
    """Tells whether a run goes on, and how it ended if it has."""

    WAITING = "waiting"  # no step is done yet
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"  # as it was asked to; the same command continues it
    FAILED = "failed"
    LOST = "lost"  # its processes are gone, or have recorded nothing for long, and nobody said why


@dataclass(frozen=True)
class Event:
    """Something that happened to the run."""

    time: float  # Unix time
    step: int  # steps that were done then
    kind: str  # "formed", "lost", "joined", "replanned", "slow", "checkpoint" (one that failed), "ended"
    text: str


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
    """Holds the means of several values over the steps of a run in a bounded number of points: the longer, the coarser.

    `revision` changes whenever points other than the newest one do, so that a client that has the others must ask for
    all of them again. It is never that of another series, or of an earlier time. Several threads may use a series.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most, self._stride = most, 1
        self._buckets: list[_Bucket] = []
        self._lock = threading.Lock()
        self.revision = next(_revisions)

    def add(self, step: int, values: Sequence[float | None]) -> None:
        """Add a step; those that were done before from its number on are done again, and no longer count."""
        known = [value is not None and math.isfinite(value) for value in values]
        sums = [value if fine and value is not None else 0.0 for value, fine in zip(values, known, strict=True)]
        new = _Bucket(step, step, sums, list(map(int, known)))
        with self._lock:
            while self._buckets and self._buckets[-1].first >= step:
                self._buckets.pop()
                self.revision = next(_revisions)
            self._append(self._buckets, new)
            if len(self._buckets) > self._most:
                self._halve()

    def _append(self, buckets: list[_Bucket], new: _Bucket) -> None:
        if buckets and (buckets[-1].first - 1) // self._stride == (new.first - 1) // self._stride:
            buckets[-1].add(new)
        else:
            buckets.append(new)

    def _halve(self) -> None:
        """Join neighbours until there is room again."""
        self.revision = next(_revisions)
        while len(self._buckets) > self._most:
            self._stride *= 2
            merged: list[_Bucket] = []
            for bucket in self._buckets:
                self._append(merged, bucket)
            self._buckets = merged

    def since(self, step: int = 0) -> list[list[float | None]]:
        """Return the points whose last step is `step` or a later one: each its last step, and the means."""
        with self._lock:
            start = len(self._buckets)
            while start and self._buckets[start - 1].last >= step:
                start -= 1
            return [bucket.point() for bucket in self._buckets[start:]]


@dataclass(frozen=True)
class LiveRank:
    """A rank of the group that trains, with means over its last steps.

    A rank whose records are elsewhere has told rank 0 what is known of it, and may have told nothing yet.
    """

    rank: int
    stages: tuple[int, ...] = ()
    slowdown: float | None = None  # its computing over that of the plan, relative to the other ranks
    is_recorded: bool = False  # whether its own records are here
    started_as: int | None = None
    host: str = ""
    node: str = ""  # identifies the machine
    processor: str = ""
    architecture: str = ""
    cores: float | None = None
    threads: int | None = None
    memory: float | None = None  # bytes that it may use
    rss_bytes: int | None = None
    cores_used: float | None = None
    step: int | None = None  # the newest one
    time: float | None = None  # of its newest record
    seconds: float | None = None  # of a step
    split: Mapping[Kind, float] = field(default_factory=dict)  # shares of a step, which add up to 1
    sent: Mapping[str, float] = field(default_factory=dict)  # bytes per second: "previous", "next", "members"
    received: Mapping[str, float] = field(default_factory=dict)


class RankFile:
    """Sums up what one process has recorded of the newest group that it is a member of, or has told rank 0 of it."""

    def __init__(self, started_as: int, about: RunInfo, before: RankFile | None, is_recorded: bool = True) -> None:
        self.started_as, self.about, self.is_recorded = started_as, about, is_recorded
        self.steps: deque[StepRecord] = deque(maxlen=WINDOW)
        self.split: Series = Series() if before is None else before.split  # compute, transfer, wait: of all its groups
        self.timelines: deque[TimelineRecord] = deque(maxlen=_MOST_TIMELINES)
        self.end: EndRecord | None = None
        self.time: float = max(about.time, before.time if before is not None else 0.0)  # of the newest record

    def take_time(self, record: Record) -> None:
        """Note when a record was made."""
        self.time = max(self.time, record.time)

    def step(self, step: StepRecord) -> None:
        """Take up a step."""
        self.steps.append(step)
        self.split.add(step.step, (step.compute, step.transfer, step.wait))

    @property
    def wall(self) -> float:
        """Return the seconds that the last steps took together."""
        return sum(step.wall for step in self.steps)

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.wall / len(self.steps) if self.steps else 0.0

    def member(self, rank: int, stages: tuple[int, ...], slowdown: float | None) -> LiveRank:
        """Return what is known of the rank."""
        about, machine, wall = self.about, self.about.machine, self.wall
        last = self.steps[-1] if self.steps else None
        found = LiveRank(
            rank=rank,
            stages=stages,
            slowdown=slowdown,
            is_recorded=self.is_recorded,
            started_as=self.started_as,
            host=printable(about.host, MOST_NAME),
            node=printable(about.node or about.host, MOST_NAME),
            processor=printable(machine.processor, MOST_NAME) if machine is not None else "",
            architecture=printable(machine.architecture, MOST_NAME) if machine is not None else "",
            cores=about.cores,
            threads=about.threads,
            memory=about.memory,
            time=self.time,
        )
        if last is None:
            return found
        found = replace(found, step=last.step, rss_bytes=last.rss_bytes, seconds=self.seconds)
        return found if wall <= 0 else replace(found, **self._rates(wall))

    def _rates(self, wall: float) -> dict[str, Any]:
        """Return what is divided by the seconds of the last steps."""
        ways = sorted({way for step in self.steps for way in step.links})
        flows = [
            {printable(way, 20): sum(step.links.get(way, (0, 0))[side] for step in self.steps) / wall for way in ways}
            for side in (0, 1)
        ]
        return {
            "cores_used": sum(step.cpu_seconds for step in self.steps) / wall,
            "split": {kind: sum(step.seconds(kind) for step in self.steps) / wall for kind in KINDS},
            "sent": flows[0],
            "received": flows[1],
        }
