"""Holds what is known of a run while it trains: of its ranks, of its loss over time, and of what has happened."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from horizonml.engine.clock import KINDS, Kind
from horizonml.report.lines import EndLine, RunRecord, StepLine, TimelineLine
from horizonml.text import printable

WINDOW = 20  # steps over which speeds and shares are averaged
_MOST_POINTS = 2000
_MOST_TIMELINES = 2  # of each rank
_MOST_NAME = 64  # characters of a machine's name


class State(StrEnum):
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


@dataclass(frozen=True)
class Point:
    """Some steps that follow each other, as one point of a curve."""

    step: int  # the last one of them
    time: float  # when it ended
    loss: float  # mean
    accuracy: float | None
    seconds: float  # of a step, mean


class Curve:
    """Holds loss and accuracy over all steps in a bounded number of points: the longer the run, the coarser."""

    def __init__(self, most: int = _MOST_POINTS) -> None:
        self._most, self._stride = most, 1
        self.points: list[Point] = []
        self._open: list[StepLine] = []  # steps that do not make a point yet

    def add(self, step: StepLine) -> None:
        """Add a step; those that were done before from its number on are done again, and no longer count."""
        while self._open and self._open[-1].step >= step.step:
            self._open.pop()
        while self.points and self.points[-1].step >= step.step:
            self.points.pop()
        self._open.append(step)
        if len(self._open) >= self._stride:
            self.points.append(_mean([Point(s.step, s.time, s.loss, s.accuracy, s.wall) for s in self._open]))
            self._open = []
        if len(self.points) >= self._most:
            self.points = [_mean(self.points[at : at + 2]) for at in range(0, len(self.points), 2)]
            self._stride *= 2


def _mean(points: list[Point]) -> Point:
    accuracies = [point.accuracy for point in points if point.accuracy is not None]
    number = len(points)
    return Point(
        points[-1].step,
        points[-1].time,
        sum(point.loss for point in points) / number,
        sum(accuracies) / len(accuracies) if accuracies else None,
        sum(point.seconds for point in points) / number,
    )


@dataclass(frozen=True)
class Member:
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

    def __init__(
        self, started_as: int, about: RunRecord, before: RankFile | None = None, is_recorded: bool = True
    ) -> None:
        self.started_as, self.about, self.is_recorded = started_as, about, is_recorded
        self.steps: deque[StepLine] = deque(maxlen=WINDOW)
        self.timelines: deque[TimelineLine] = deque(maxlen=_MOST_TIMELINES)
        self.end: EndLine | None = None
        self.time: float = max(about.time, before.time if before is not None else 0.0)  # of the newest record

    def note_time(self, line: Mapping[str, Any]) -> None:
        """Note when a record was made."""
        when = line.get("time")
        if isinstance(when, int | float) and self.time < when < 1e12:
            self.time = float(when)

    def step(self, step: StepLine) -> None:
        """Take up a step."""
        self.steps.append(step)

    @property
    def wall(self) -> float:
        """Return the seconds that the last steps took together."""
        return sum(step.wall for step in self.steps)

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.wall / len(self.steps) if self.steps else 0.0

    def member(self, rank: int, stages: tuple[int, ...], slowdown: float | None) -> Member:
        """Return what is known of the rank."""
        about, machine, wall = self.about, self.about.machine, self.wall
        last = self.steps[-1] if self.steps else None
        directions = sorted({name for step in self.steps for name in step.links})
        flows = [
            {
                printable(name, 20): sum(step.links.get(name, (0, 0))[way] for step in self.steps) / wall
                for name in directions
            }
            for way in (0, 1)
            if wall > 0
        ] or [{}, {}]
        return Member(
            rank=rank,
            stages=stages,
            slowdown=slowdown,
            is_recorded=self.is_recorded,
            started_as=self.started_as,
            host=printable(about.host, _MOST_NAME),
            node=printable(about.node or about.host, _MOST_NAME),
            processor=printable(machine.processor, _MOST_NAME) if machine is not None else "",
            architecture=printable(machine.architecture, _MOST_NAME) if machine is not None else "",
            cores=about.cores,
            threads=about.threads,
            memory=about.memory,
            rss_bytes=last.rss_bytes if last is not None else None,
            cores_used=sum(step.cpu_seconds for step in self.steps) / wall if wall > 0 else None,
            step=last.step if last is not None else None,
            time=self.time,
            seconds=self.seconds if last is not None else None,
            split={kind: sum(step.seconds(kind) for step in self.steps) / wall for kind in KINDS} if wall > 0 else {},
            sent=flows[0],
            received=flows[1],
        )
