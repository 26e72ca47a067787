"""Takes up the records of a run, one after the other: who is in its group, how far it is, and what has happened."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from horizonml.report.lines import (
    EndLine,
    EvaluationLine,
    RanksLine,
    RecoveryLine,
    RunRecord,
    StepLine,
    TimelineLine,
)
from horizonml.report.live_facts import Curve, Event, RankFile
from horizonml.text import count, human_seconds, printable

DONE = {"complete", "already complete", "complete without this rank"}
STOPPED = {"stopped", "stopped waiting"}
_MOST_EVENTS = 500
_MOST_EVALUATIONS = 5000
_SLOW = 1.5  # times as long as planned, from where a rank's slowness is an event

_MOST = 1e15  # what seconds, bytes and counts stay below, so that their sums are numbers, too
_NEVER_NEGATIVE = ("wall", "compute", "transfer", "wait", "cpu_seconds", "rss_bytes", "seconds", "step", "rank")

_Model = TypeVar("_Model", bound=BaseModel)


class StepObserver(Protocol):
    """Takes the steps of all ranks as they are read."""

    def begin(self) -> None:
        """Forget all steps: the records are read from their beginning."""

    def step(self, file: RankFile, step: StepLine, leads: bool) -> None:
        """Take a step that a rank has recorded; `leads` says that the rank is rank 0 of its group."""


class Records:
    """Holds what the records of a run have said until now."""

    def __init__(self, observer: StepObserver | None = None) -> None:
        """Begin without any records; the `observer` gets the steps of all ranks."""
        self._observer = observer
        if observer is not None:
            observer.begin()
        self.files: dict[int, RankFile] = {}  # by the rank that the process was started as
        self.lead: RankFile | None = None  # the file of the process that is rank 0 of the newest group
        self.newest: StepLine | None = None  # the last step that a rank 0 has recorded
        self.unreadable = 0
        self.others: RanksLine | None = None  # what the ranks on other machines have told last
        self.curve = Curve()
        self.evaluations: deque[EvaluationLine] = deque(maxlen=_MOST_EVALUATIONS)
        self.events: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self.slowdowns: tuple[float, ...] = ()  # each rank's computing over that of the plan, as last compared
        self.checkpoint: int | None = None  # the step of the newest checkpoint that was saved
        self._slow: tuple[int, ...] = ()

    @property
    def step(self) -> int:
        """Return how many steps are done."""
        if self.lead is None:
            return 0
        return self.lead.steps[-1].step if self.lead.steps else self.lead.about.resumed_at

    def take(self, started_as: int, line: dict[str, Any]) -> None:
        """Take up a record of the process that was started as a rank."""
        kind = line.get("kind")
        if kind == "run":
            about = self._read(RunRecord, line)
            if about is not None:
                self._describe(started_as, about)
            return
        file = self.files.get(started_as)
        if file is None:
            return
        file.note_time(line)
        leads = file is self.lead
        if kind == "step":
            self._step(file, self._read(StepLine, line), leads)
        elif kind == "timeline":
            timeline = self._read(TimelineLine, line)
            if timeline is not None:
                file.timelines.append(timeline)
        elif kind == "evaluation" and leads:
            self._evaluation(self._read(EvaluationLine, line))
        elif kind == "recovery" and leads:
            self._recovery(self._read(RecoveryLine, line))
        elif kind == "ranks" and leads:
            self.others = self._read(RanksLine, line) or self.others
        elif kind == "slowdowns" and leads:
            self._slowdowns(line, file.time)
        elif kind == "checkpoint" and leads:
            self._checkpoint(line, file.time)
        elif kind == "followed":
            self._event(file.time, "joined", f"rank {file.about.rank} has caught up and works on samples")
        elif kind == "end":
            self._end(file, self._read(EndLine, line), leads)

    def _read(self, model: type[_Model], line: dict[str, Any]) -> _Model | None:
        try:
            found = model.model_validate(line)
        except ValidationError:
            found = None
        if found is not None and _is_sound(found):
            return found
        self.unreadable += 1
        return None

    def _describe(self, started_as: int, about: RunRecord) -> None:
        before = self.files.get(started_as)
        file = self.files[started_as] = RankFile(started_as, about, before)
        if about.rank != 0 or (self.lead is not None and about.time < self.lead.about.time):
            return
        earlier, self.lead = self.lead, file
        self.slowdowns, self._slow, self.others = (), (), None
        ranks = count(about.world_size or 1, "rank")
        outcome = earlier.end.outcome if earlier is not None and earlier.end is not None else ""
        if outcome == "re-plan":
            seconds = f", predicted to take {human_seconds(about.forecast)} a step" if about.forecast else ""
            self._event(about.time, "replanned", f"goes on by another plan{seconds}")
        elif earlier is not None and about.resumed_at and outcome not in DONE | STOPPED:
            change = (about.world_size or 1) - (earlier.about.world_size or 1)
            kind = "joined" if change > 0 else "lost" if change < 0 else "formed"
            self._event(about.time, kind, f"goes on with {ranks} ({earlier.about.world_size or 1} before)")
        else:
            where = f" from step {about.resumed_at}" if about.resumed_at else ""
            self._event(about.time, "formed", f"{ranks} begin{'s' * (about.world_size == 1)} to train{where}")

    def _step(self, file: RankFile, step: StepLine | None, leads: bool) -> None:
        if step is not None:
            file.step(step)
            if leads:
                self.newest = step
                self.curve.add(step)
            if self._observer is not None:
                self._observer.step(file, step, leads)

    def _evaluation(self, line: EvaluationLine | None) -> None:
        if line is not None:
            while self.evaluations and self.evaluations[-1].step >= line.step:  # it is done again
                self.evaluations.pop()
            self.evaluations.append(line)

    def _recovery(self, line: RecoveryLine | None) -> None:
        if line is not None:
            ranks = f"rank{'s' * (len(line.lost) != 1)} {', '.join(map(str, line.lost[:20]))}"
            again = f", {count(line.steps_repeated, 'step')} again" if line.steps_repeated else ""
            text = f"{ranks} lost; went on after {human_seconds(line.seconds)}, from {line.source.value}{again}"
            self._event(line.time, "lost", text)

    def _slowdowns(self, line: dict[str, Any], when: float) -> None:
        factors = line.get("slowdowns")
        if not isinstance(factors, list) or not all(map(_is_number, factors)):
            self.unreadable += 1
            return
        self.slowdowns = tuple(map(float, factors))
        slow = tuple(rank for rank, factor in enumerate(self.slowdowns) if factor > _SLOW)
        if slow != self._slow:
            reasons = line.get("reasons")
            known = reasons if isinstance(reasons, dict) else {}
            told = "; ".join(
                f"rank {rank} computes {self.slowdowns[rank]:.1f} times as long as planned"
                + (f", because {printable(str(known[str(rank)]), 200)}" if str(rank) in known else "")
                for rank in slow[:5]
            )
            self._event(when, "slow", told or "all ranks are as fast as planned again")
        self._slow = slow

    def _checkpoint(self, line: dict[str, Any], when: float) -> None:
        step = line.get("step")
        if isinstance(step, int) and line.get("saved") is True:
            self.checkpoint = step
        else:
            self._event(when, "checkpoint", "a checkpoint could not be saved")

    def _end(self, file: RankFile, line: EndLine | None, leads: bool) -> None:
        file.end = line
        if line is not None and leads and line.outcome not in ("re-plan", "re-form"):
            words = "training failed, or lost a rank" if line.outcome == "failed" else f"training is {line.outcome}"
            self._event(file.time, "ended", printable(words, 100))

    def _event(self, when: float, kind: str, text: str) -> None:
        self.events.append(Event(when, self.step, kind, text))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < _MOST


def _is_sound(found: BaseModel) -> bool:
    """Return whether the numbers of a record can be counted with."""
    values = vars(found)
    if not all(_is_number(value) for value in values.values() if isinstance(value, int | float)):
        return False
    if any((values.get(name) or 0) < 0 for name in _NEVER_NEGATIVE):
        return False
    return not isinstance(found, StepLine) or all(_is_number(size) for pair in found.links.values() for size in pair)
