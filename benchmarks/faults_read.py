"""Reads from the ranks' records what a fault has cost; all times are those in the records."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.chaos.accounting import read_records


@dataclass(frozen=True)
class Seen:
    """One recorded step, and the group that took it."""

    step: int
    time: float  # when it ended, Unix time
    batch: int
    generation: int
    world_size: int


@dataclass
class Trace:
    """What one rank has recorded, through all processes that it was started as."""

    steps: list[Seen] = field(default_factory=list)
    formed: list[tuple[float, int]] = field(default_factory=list)  # when it entered a group, and of how many ranks
    broken: list[float] = field(default_factory=list)  # when a group broke under it

    def again(self, since: float, world_size: int | None = None) -> float | None:
        """When the first step of a group ended that was formed after `since` (of that many ranks, if given)."""
        groups = [time for time, size in self.formed if time > since and size == (world_size or size)]
        return next((seen.time for seen in self.steps if groups and seen.time > groups[0]), None)

    def noticed(self, since: float) -> float | None:
        """When the first group broke after `since`."""
        return next((time for time in self.broken if time > since), None)


def read_trace(path: Path) -> Trace:
    """The trace in a rank's file, as far as it is written; lines that a kill cut short are left out."""
    trace, generation, world_size = Trace(), 0, 0
    for record in read_records(path):
        if record["kind"] == "run":
            generation, world_size = record["generation"], record["world_size"]
            trace.formed.append((record["time"], world_size))
        elif record["kind"] == "step":
            trace.steps.append(Seen(record["step"], record["time"], record["batch"], generation, world_size))
        elif record["kind"] == "end" and record["outcome"] == "failed":
            trace.broken.append(record["time"])
    return trace


def repeated_steps(traces: Sequence[Trace]) -> int:
    """How many steps were recorded again in a later group, by any of these ranks."""
    taken = {(seen.generation, seen.step) for trace in traces for seen in trace.steps}
    return len(taken) - len({step for _, step in taken})


def progress(traces: Sequence[Trace]) -> list[Seen]:
    """Each step as it was recorded first, by any rank: what a step that is taken again adds nothing to."""
    first: dict[int, Seen] = {}
    for seen in sorted((seen for trace in traces for seen in trace.steps), key=lambda seen: seen.time):
        first.setdefault(seen.step, seen)
    return list(first.values())


def gaps(times: Sequence[float], begin: float, end: float) -> list[float]:
    """The seconds between successive times, of those gaps that touch the window."""
    ordered = sorted(times)
    return [b - a for a, b in pairwise(ordered) if b > begin and a < end]


@dataclass(frozen=True)
class Window:
    """How fast training went for a while, and where its time went."""

    seconds: float
    gained_per_second: float  # samples of steps that were not taken before
    worked_per_second: float  # samples of all steps, those that were repeated too
    steps: int  # that were not taken before
    repeated: int
    stalled: float  # seconds of the window in which no step ended for more than three usual steps
    step_seconds: dict[int, float]  # median by the number of ranks, where there are enough steps for one

    def to_json(self) -> dict[str, Any]:
        """Return the window as a JSON object."""
        return {**vars(self), "step_seconds": {str(size): value for size, value in self.step_seconds.items()}}


def window(traces: Sequence[Trace], begin: float, end: float, enough: int = 20) -> Window:
    """What the ranks have done between two times; fewer than `enough` steps are not enough for a median."""
    inside = [Trace([seen for seen in trace.steps if begin <= seen.time < end]) for trace in traces]
    before = max((seen.step for trace in traces for seen in trace.steps if seen.time < begin), default=0)
    new = [seen for seen in progress(inside) if seen.step > before]
    by_size: dict[int, list[float]] = defaultdict(list)
    times = sorted({seen.time: seen.world_size for trace in inside for seen in trace.steps}.items())
    for trace in inside:
        for a, b in pairwise(trace.steps):
            if a.generation == b.generation and b.time > a.time:
                by_size[b.world_size].append(b.time - a.time)
    medians = {size: statistics.median(values) for size, values in sorted(by_size.items())}
    usual = medians[max(medians)] if medians else 0.0
    medians = {size: median for size, median in medians.items() if len(by_size[size]) >= enough}
    edges = [begin, *(time for time, _ in times), end]
    stalls = [b - a - usual for a, b in pairwise(edges) if b - a > 3 * usual]
    seconds, gained = end - begin, sum(seen.batch for seen in new)
    worked = sum({(seen.generation, seen.step): seen.batch for trace in inside for seen in trace.steps}.values())
    return Window(seconds, gained / seconds, worked / seconds, len(new), repeated_steps(inside), sum(stalls), medians)
