"""Follows a run in a thread, and keeps ready what the page asks for.

It also holds values over the steps of a run in a bounded number of points: the longer the run, the coarser.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizonml.report.lines import StepLine
from horizonml.report.live import LiveRun
from horizonml.report.live_facts import RankFile
from horizonml.report.page.describe import SimulatedStep, describe_run, describe_timeline, problem_of

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


_log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0  # between two looks at the records
_CLOSE_SECONDS = 5.0
_READING = {"state": "reading", "words": "the records are being read"}


class Watcher:
    """Reads the records of a run as they come."""

    def __init__(self, folder: Path) -> None:
        """Begin to follow the run in `folder`, which need not be there yet."""
        self._folder = folder
        self._lock = threading.Lock()  # held while what is below changes, which never takes long
        self._loss = Series(3)  # loss, accuracy, seconds of a step
        self._split: dict[int, Series] = {}  # compute, transfer, wait: by the rank that a process was started as
        self._described: dict[str, Any] = dict(_READING, name=folder.absolute().name)
        self._timeline: dict[str, Any] | None = None  # recorded
        self._predicted: dict[str, Any] | None = None
        self._evaluations: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._ranks: dict[int, int] = {}  # what the members were started as
        self._forgotten = 0  # revisions of series that were thrown away
        self._simulated = SimulatedStep()
        self._run = LiveRun(folder, observer=self)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="page, records", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following."""
        self._over.set()
        self._thread.join(_CLOSE_SECONDS)

    def run(self) -> dict[str, Any]:
        """Return how the run stands."""
        with self._lock:
            return dict(self._described)

    def timeline(self, known: int, is_predicted: bool) -> dict[str, Any] | None:
        """Return what the ranks did when in the newest step of which that is recorded, or None.

        If none is recorded, or if `is_predicted` asks for it, it is a simulated one. A client that has one of step
        `known` already gets no more than its number, unless there is a newer one.
        """
        with self._lock:
            found = self._predicted if is_predicted or self._timeline is None else self._timeline
        if found is not None and not found["is_simulated"] and found["step"] == known:
            return {"step": known}
        return found

    def events(self) -> list[dict[str, Any]]:
        """Return what has happened, the oldest first."""
        with self._lock:
            return self._events

    def history(self, since: int, revision: int) -> dict[str, Any]:
        """Return the points that are newer than those of a client, or all if its revision is an old one."""
        with self._lock:
            now = self._forgotten + sum(series.revision for series in (self._loss, *self._split.values()))
            if revision != now:
                since = 0
            parts = {str(rank): self._split[file] for rank, file in self._ranks.items() if file in self._split}
            return {
                "revision": now,
                "since": since,
                "columns": ["step", "loss", "accuracy", "seconds"],
                "steps": self._loss.since(since),
                "rank_columns": ["step", "compute", "transfer", "wait"],
                "ranks": {rank: series.since(since) for rank, series in parts.items()},
                "evaluations": [one for one in self._evaluations if one["step"] >= since],
            }

    def begin(self) -> None:
        """Forget all steps."""
        with self._lock:
            self._forgotten += 1 + sum(series.revision for series in (self._loss, *self._split.values()))
            self._loss, self._split = Series(3), {}

    def step(self, file: RankFile, step: StepLine, leads: bool) -> None:
        """Take a step that a rank has recorded."""
        with self._lock:
            if leads:
                self._loss.add(step.step, (step.loss, step.accuracy, step.wall))
            split = self._split.setdefault(file.started_as, Series(3))
            split.add(step.step, (step.compute, step.transfer, step.wait))

    def _follow(self) -> None:
        known: set[str] = set()
        while not self._over.is_set():
            try:
                self._run.poll()
                self._describe()
            except Exception as error:  # noqa: BLE001  (damaged records end neither the page nor what it runs beside)
                words = f"{type(error).__name__}: {error}"
                if words not in known:
                    _log.warning("the records in %s cannot be read: %s", self._folder, words)
                known.add(words)
                with self._lock:
                    self._described = {**self._described, "problem": "the records could not be read; see the log"}
            self._over.wait(_LOOK_SECONDS)

    def _describe(self) -> None:
        run = self._run
        described = describe_run(run)
        described["problem"] = problem_of(self._folder, run.planning)
        timeline, predicted = describe_timeline(run), self._simulated.timeline(run.planning)
        described["has_both_timelines"] = timeline is not None and predicted is not None
        events = [vars(event) for event in run.events]
        evaluations = [
            {"step": one.step, "epoch": one.epoch, "loss": one.loss, "accuracy": one.accuracy, "best": one.best}
            for one in run.evaluations
        ]
        ranks = {member.rank: member.started_as for member in run.members if member.started_as is not None}
        with self._lock:
            self._described, self._timeline, self._predicted = described, timeline, predicted
            self._events = events
            self._evaluations, self._ranks = evaluations, ranks


def encode(value: Any) -> bytes:
    """Return a value as JSON that browsers read: numbers that are not finite become null."""
    return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
