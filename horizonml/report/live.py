"""Tells how a run stands, from its records and while they are written: for `horizonml watch`, and for pages.

Records are read as they come, and what was read is summed up at once, so that a long run takes no more memory than a
short one. A line that is damaged, or that this version cannot read, is counted and skipped.

It also reads files of records while they are written: whole lines only, in the order of time, and nothing twice.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from horizonml.errors import HorizonError
from horizonml.planner.record import FILE, Planning, read_planning
from horizonml.report.lines import EvaluationLine, PlanFacts, RunRecord, StepLine, TimelineLine
from horizonml.report.live_facts import Event, Member, Point, RankFile, State
from horizonml.report.taking import DONE, STOPPED, Records, StepObserver
from horizonml.telemetry.lifeline import is_alive
from horizonml.text import printable

_CHUNK = 1 << 20  # bytes that are read at a time
_LATEST = 1e12  # Unix time
_LONGEST = 1 << 24  # bytes of a line; a longer one is damaged

Line = dict[str, Any]


@dataclass
class Tail:
    """Reads one file from where the last reading has ended."""

    path: Path
    damaged: int = 0  # lines that are no JSON object; they are skipped
    _offset: int = 0
    _file: tuple[int, int] | None = None  # which file was read
    _rest: bytes = b""  # of a line that has not ended
    _time: float = field(default=0.0, repr=False)  # of the newest record that has one

    @property
    def is_replaced(self) -> bool:
        """Return whether another file is there now, or this one was cut: what was read of it no longer holds."""
        try:
            now = self.path.stat()
        except OSError:
            return self._file is not None
        return self._file not in (None, (now.st_dev, now.st_ino)) or now.st_size < self._offset

    def read(self) -> Iterator[tuple[float, Line]]:
        """Yield the records that were added, each with its time: that of the record before it if it has none itself."""
        while chunk := self._chunk():
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                record = self._parse(line)
                if record is not None:
                    yield self._time, record
            if len(self._rest) > _LONGEST:
                self.damaged, self._rest = self.damaged + 1, b""

    def _chunk(self) -> bytes:
        """Return what comes next in the file, which is open only for that moment; nothing if it cannot be read."""
        try:
            with self.path.open("rb") as file:
                if self._file is None:
                    now = self.path.stat()
                    self._file = now.st_dev, now.st_ino
                file.seek(self._offset)
                chunk = file.read(_CHUNK)
        except OSError:  # it was moved away, or its disk is gone; `is_replaced` tells
            return b""
        self._offset += len(chunk)
        return chunk

    def _parse(self, line: bytes) -> Line | None:
        try:
            record = json.loads(line, parse_constant=lambda constant: None)  # what is no number is not known
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            self.damaged += bool(line.strip())
            return None
        when = record.get("time")
        if isinstance(when, int | float) and 0 <= when < _LATEST:
            self._time = float(when)
        return record


class Tails:
    """Reads the files of all ranks in a run's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, Tail] = {}  # by the rank that the process was started as

    @property
    def damaged(self) -> int:
        """Return how many lines were skipped."""
        return sum(tail.damaged for tail in self._files.values())

    @property
    def is_replaced(self) -> bool:
        """Return whether the run was begun anew, so that all must be read again."""
        return any(tail.is_replaced for tail in self._files.values())

    def read(self) -> Iterator[tuple[int, Line]]:
        """Yield the records that were added to any file, in the order of time, with the rank whose file it is."""
        for path in self._folder.glob("rank-*.jsonl"):
            number = path.stem.partition("-")[2]
            if number.isdecimal():
                self._files.setdefault(int(number), Tail(path))
        added = (self._labelled(rank, tail) for rank, tail in sorted(self._files.items()))
        for _, rank, record in heapq.merge(*added, key=itemgetter(0)):
            yield rank, record

    def _labelled(self, rank: int, tail: Tail) -> Iterator[tuple[float, int, Line]]:
        for when, record in tail.read():
            yield when, rank, record


_SILENT_SECONDS = 60.0  # without a record, after which a run counts as lost
_SILENT_STEPS = 20  # and as many steps must have been missed


class LiveRun:
    """Follows the run in a folder. Call `poll` before you look at it, as often as you like."""

    def __init__(
        self, folder: Path, clock: Callable[[], float] = time.time, observer: StepObserver | None = None
    ) -> None:
        """Prepare to follow the run; the `observer` gets the steps of all ranks."""
        self.folder = folder
        self._clock, self._observer = clock, observer
        self._begin()

    def _begin(self) -> None:
        """Forget everything that was read."""
        self._tails, self._records = Tails(self.folder), Records(self._observer)
        self._planned: float | None = None  # when the file had been written that `planning` was read from
        self.planning: Planning | None = None  # what the plan was made of, if the folder says it

    def poll(self) -> bool:
        """Read what was recorded since the last call; return whether there was anything."""
        anew = self._tails.is_replaced  # as `--fresh` does
        if anew:
            self._begin()
        found = False
        for started_as, line in self._tails.read():
            self._records.take(started_as, line)
            found = True
        return self._read_planning() or found or anew

    def _read_planning(self) -> bool:
        """Read the plan's file if it has changed; return whether it has."""
        try:
            written = (self.folder / FILE).stat().st_mtime
        except OSError:
            written = None
        if written == self._planned:
            return False
        self._planned = written
        try:
            self.planning = read_planning(self.folder)
        except HorizonError:  # the rest can be shown without it
            self.planning = None
        return True

    @property
    def damaged(self) -> int:
        """Return how many lines of the records could not be read."""
        return self._tails.damaged + self._records.unreadable

    # What is known of the run as a whole.

    @property
    def about(self) -> RunRecord | None:
        """Return how rank 0 describes the run, or None as long as nothing is recorded."""
        return self._records.lead.about if self._records.lead is not None else None

    @property
    def name(self) -> str:
        """Return the name of the job, or of the folder if that is not recorded."""
        job = self.about.job if self.about is not None else None
        named = getattr(job, "name", None)
        return printable(named if isinstance(named, str) else self.folder.absolute().name, 100)

    @property
    def plan(self) -> PlanFacts:
        """Return the plan that the ranks train by."""
        return self.about.plan if self.about is not None else PlanFacts()

    @property
    def layers(self) -> list[str]:
        """Return the names of the model's layers."""
        return [printable(name, 100) for name in self.about.layers] if self.about is not None else []

    @property
    def state(self) -> State:
        """Return whether the run goes on, and how it ended if it has."""
        lead = self._records.lead
        if lead is None:
            return State.WAITING
        outcome = lead.end.outcome if lead.end is not None else None
        if outcome in DONE:
            return State.FINISHED
        if outcome in STOPPED:
            return State.STOPPED
        seen = [is_alive(self.folder, rank) for rank in self._records.files]
        alive = True if True in seen else False if False in seen else None
        if outcome == "failed" and not alive:
            return State.FAILED
        silent = self._clock() - max(file.time for file in self._records.files.values())
        patience = max(_SILENT_SECONDS, _SILENT_STEPS * lead.seconds)
        if alive is False or (alive is None and silent > patience):
            return State.LOST
        return State.RUNNING if self.newest is not None else State.WAITING

    @property
    def newest(self) -> StepLine | None:
        """Return the newest step as rank 0 recorded it."""
        return self._records.newest

    @property
    def step(self) -> int:
        """Return how many steps are done."""
        return self._records.step

    @property
    def evaluations(self) -> Sequence[EvaluationLine]:
        """Return the evaluations on held-out data, in order."""
        return self._records.evaluations

    @property
    def events(self) -> Sequence[Event]:
        """Return what has happened to the run, in order; of very many events the last ones."""
        return self._records.events

    @property
    def checkpoint(self) -> int | None:
        """Return the step of the newest checkpoint that was saved."""
        return self._records.checkpoint

    @property
    def slowdowns(self) -> tuple[float, ...]:
        """Return each rank's computing over that of the plan, as last compared; empty if that was never done."""
        return self._records.slowdowns

    @property
    def total_steps(self) -> int | None:
        """Return how many steps the run has if it does not end early, or None if its records are too old to say."""
        return self.about.total_steps if self.about is not None else None

    @property
    def total_epochs(self) -> int | None:
        """Return how many epochs the run has if it does not end early, or None if that is not recorded."""
        if self.about is None:
            return None
        return self.about.total_epochs or (self.about.job.epochs if self.about.job is not None else None)

    @property
    def step_seconds(self) -> float | None:
        """Return how long a step takes, as the mean over the last ones."""
        return self._records.lead.seconds if self._records.lead is not None and self._records.lead.steps else None

    @property
    def forecast(self) -> float | None:
        """Return how long the plan was predicted to take for a step, in seconds."""
        return self.about.forecast if self.about is not None else None

    @property
    def speed(self) -> tuple[float, str] | None:
        """Return how much is trained on in a second, and in which unit: samples, or for example tokens."""
        if self._records.lead is None or not self._records.lead.steps or not self._records.lead.wall:
            return None
        steps = self._records.lead.steps
        done = sum(step.batch if step.unit == "samples" else step.units for step in steps)
        return done / self._records.lead.wall, printable(steps[-1].unit, 20)

    @property
    def seconds_left(self) -> float | None:
        """Return for how long the remaining steps take at the present speed, or None if that is not known."""
        if self.state is not State.RUNNING or self.total_steps is None or self.step_seconds is None:
            return None
        return max(0, self.total_steps - self.step) * self.step_seconds

    @property
    def accuracy(self) -> float | None:
        """Return the accuracy on held-out data, else on the last batch; None where there is none."""
        held_out = self.evaluations[-1].accuracy if self.evaluations else None
        return held_out if held_out is not None else self.newest.accuracy if self.newest is not None else None

    @property
    def points(self) -> list[Point]:
        """Return the loss and the accuracy of the training's batches over its steps, at most some thousand points."""
        return self._records.curve.points

    # What is known of its ranks.

    @property
    def members(self) -> list[Member]:
        """Return the ranks of the newest group, in order; those that record elsewhere as they have told rank 0."""
        about = self.about
        if about is None:
            return []
        found = dict(self._records.told)
        for file in self._records.files.values():
            rank = file.about.rank
            known = found.get(rank)
            if self._records.is_of_group(file) and (
                known is None or not known.is_recorded or known.about.time < file.about.time
            ):
                found[rank] = file
        ranks = {rank for stage in self.plan.stages for rank in stage.ranks} | set(found)
        return [self._member(rank, found.get(rank)) for rank in sorted(ranks)]

    def _member(self, rank: int, file: RankFile | None) -> Member:
        stages = tuple(number for number, stage in enumerate(self.plan.stages) if rank in stage.ranks)
        slowdown = self.slowdowns[rank] if 0 <= rank < len(self.slowdowns) else None
        return file.member(rank, stages, slowdown) if file is not None else Member(rank, stages, slowdown)

    @property
    def timeline(self) -> tuple[int, dict[int, TimelineLine]] | None:
        """Return what the ranks did when in the newest step of which that is recorded, by rank, with the step."""
        lines = [(file.about.rank, line) for file in self._records.files.values() for line in file.timelines]
        if not lines:
            return None
        steps = [line.step for _, line in lines]
        newest = max(steps, key=lambda step: (steps.count(step), step))  # the one that most ranks have recorded
        return newest, {rank: line for rank, line in sorted(lines, key=lambda pair: pair[0]) if line.step == newest}
