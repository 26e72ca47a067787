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
_MOST_NAME = 64  # characters of a device's name
_MOST_EVALUATIONS = 5000
_FORMING_SECONDS = 60.0  # the ranks of a group describe it within this time of each other

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
        self.told: dict[int, RankFile] = {}  # what the other ranks of the newest group have told rank 0 last
        self.curve = Curve()
        self.evaluations: deque[EvaluationLine] = deque(maxlen=_MOST_EVALUATIONS)
        self.events: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self.slowdowns: tuple[float, ...] = ()  # each rank's computing over that of the plan, as last compared
        self.checkpoint: int | None = None  # the step of the newest checkpoint that was saved
        self._hosts: dict[int, str] = {}  # what devices were called last, by the rank that they were started as

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
            self._tell(self._read(RanksLine, line))
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
        self.slowdowns = ()
        others = [one for one in about.members if one.rank != 0]
        self._hosts |= {one.started_as_rank: printable(one.host, _MOST_NAME) for one in about.members}
        self.told = {one.rank: RankFile(one.started_as_rank, about.of(one), is_recorded=False) for one in others}
        ranks = count(about.world_size or 1, "rank")
        outcome = earlier.end.outcome if earlier is not None and earlier.end is not None else ""
        if outcome == "re-plan":
            seconds = f", predicted to take {human_seconds(about.forecast)} a step" if about.forecast else ""
            self._event(about.time, "replanned", f"goes on by another plan{seconds}")
        elif earlier is not None and about.resumed_at and outcome not in DONE | STOPPED:
            came, gone = _names(about, earlier.about), _names(earlier.about, about)
            change = (about.world_size or 1) - (earlier.about.world_size or 1)
            kind = "joined" if came or change > 0 else "lost" if change < 0 else "formed"
            words = [f"{name} joined" for name in came]
            words += [f"{name} left" for name in gone if outcome == "re-form"]  # who was lost is told in a moment
            words.append(f"goes on with {ranks} ({earlier.about.world_size or 1} before)")
            self._event(about.time, kind, "; ".join(words))
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

    def is_of_group(self, file: RankFile) -> bool:
        """Return whether a file is that of a member of the newest group."""
        lead = self.lead.about if self.lead is not None else None
        return lead is not None and file.about.group == lead.group and file.about.time > lead.time - _FORMING_SECONDS

    def _tell(self, line: RanksLine | None) -> None:
        """Take up what ranks have told whose own records are elsewhere."""
        if line is None or self.newest is None:
            return
        base = self.newest.model_copy(update={"step": line.step - 1, "time": line.time})
        for rank, file in self.told.items():
            own = self.files.get(file.started_as)
            step = line.step_of(rank, base)
            if step is None or (own is not None and self.is_of_group(own)):
                continue
            file.note_time({"time": line.time})
            file.steps.clear()
            file.step(step)
            if self._observer is not None:
                self._observer.step(file, step, False)

    def _evaluation(self, line: EvaluationLine | None) -> None:
        if line is not None:
            while self.evaluations and self.evaluations[-1].step >= line.step:  # it is done again
                self.evaluations.pop()
            self.evaluations.append(line)

    def _recovery(self, line: RecoveryLine | None) -> None:
        if line is not None:
            lost = [f"{rank} ({name})" if (name := self._hosts.get(rank)) else str(rank) for rank in line.lost[:20]]
            ranks = f"rank{'s' * (len(line.lost) != 1)} {', '.join(lost)}"
            again = f", {count(line.steps_repeated, 'step')} again" if line.steps_repeated else ""
            text = f"{ranks} lost; went on after {human_seconds(line.seconds)}, from {line.source.value}{again}"
            self._event(line.time, "lost", text)

    def _slowdowns(self, line: dict[str, Any], when: float) -> None:
        factors = line.get("slowdowns")
        if not isinstance(factors, list) or not all(map(_is_number, factors)):
            self.unreadable += 1
            return
        self.slowdowns = tuple(map(float, factors))
        slow, reasons = line.get("stragglers"), line.get("reasons")
        if isinstance(slow, list):  # the ranks have decided that people should hear of it
            known = reasons if isinstance(reasons, dict) else {}
            factors = {str(rank): factor for rank, factor in enumerate(self.slowdowns) if rank in slow}
            told = [
                f"rank {rank} computes {factor:.1f} times as long as planned"
                + (f", because {printable(str(known[rank]), 200)}" if rank in known else "")
                for rank, factor in factors.items()
            ]
            told += [
                f"rank {printable(rank, 10)}: {printable(str(why), 200)}"
                for rank, why in known.items()
                if rank not in factors
            ]
            self._event(when, "slow", "; ".join(told[:5]) or "all ranks are as fast as planned again")

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


def _names(there: RunRecord, elsewhere: RunRecord) -> list[str]:
    """Return which members of one group another one lacks, as far as the records say who they are."""
    known = {one.started_as_rank for one in elsewhere.members}
    return [
        f"rank {one.started_as_rank} ({printable(one.host, _MOST_NAME)})"
        for one in there.members
        if known and one.started_as_rank not in known
    ]


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
