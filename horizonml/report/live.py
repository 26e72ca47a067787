"""Tells how a run stands, from its records and while they are written: for `horizonml top`, and for the page.

Records are read as they come, and what was read is summed up at once, so that a long run takes no more memory than a
short one. A line that is damaged, or that this version cannot read, is counted and skipped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from horizonml.errors import HorizonError
from horizonml.planner.record import FILE, Planning, read_planning
from horizonml.report.lines import (
    EndLine,
    EvaluationLine,
    PlanFacts,
    RanksLine,
    RecoveryLine,
    RunRecord,
    StepLine,
    TimelineLine,
)
from horizonml.report.live_facts import Curve, Event, Member, Point, RankFile, State, told
from horizonml.report.tail import Tails
from horizonml.telemetry.lifeline import is_alive
from horizonml.text import count, human_seconds, printable

_FORMING_SECONDS = 60.0  # the ranks of a group describe it within this time of each other
_SILENT_SECONDS = 60.0  # without a record, after which a run counts as lost
_SILENT_STEPS = 20  # and as many steps must have been missed
_MOST_EVENTS = 500
_MOST_EVALUATIONS = 5000
_SLOW = 1.5  # times as long as planned, from where a rank's slowness is an event
_DONE = {"complete", "already complete", "complete without this rank"}
_STOPPED = {"stopped", "stopped waiting"}

_Model = TypeVar("_Model", bound=BaseModel)


class LiveRun:
    """Follows the run in a folder. Call `poll` before you look at it, as often as you like."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        """Forget everything that was read."""
        self._tails = Tails(self.folder)
        self._files: dict[int, RankFile] = {}
        self._lead: RankFile | None = None  # the file of the process that is rank 0 of the newest group
        self._unreadable = 0
        self._others: RanksLine | None = None  # what the ranks on other machines have told last
        self._planned: float | None = None  # when the file had been written that `planning` was read from
        self._slow: tuple[int, ...] = ()
        self.curve = Curve()
        self.evaluations: deque[EvaluationLine] = deque(maxlen=_MOST_EVALUATIONS)
        self.events: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self.slowdowns: tuple[float, ...] = ()  # each rank's computing over that of the plan, as last compared
        self.checkpoint: int | None = None  # the step of the newest checkpoint that was saved
        self.planning: Planning | None = None  # what the plan was made of, if the folder says it

    def poll(self) -> bool:
        """Read what was recorded since the last call; return whether there was anything."""
        anew = self._tails.is_replaced  # as `--fresh` does
        if anew:
            self._begin()
        found = False
        for started_as, line in self._tails.read():
            self._take(started_as, line)
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
        return self._tails.damaged + self._unreadable

    # What is known of the run as a whole.

    @property
    def about(self) -> RunRecord | None:
        """Return how rank 0 describes the run, or None as long as nothing is recorded."""
        return self._lead.about if self._lead is not None else None

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
        lead = self._lead
        if lead is None:
            return State.WAITING
        outcome = lead.end.outcome if lead.end is not None else None
        if outcome in _DONE:
            return State.FINISHED
        if outcome in _STOPPED:
            return State.STOPPED
        alive = is_alive(self.folder, lead.started_as)
        if outcome == "failed" and not alive:
            return State.FAILED
        silent = self._clock() - max(file.time for file in self._files.values())
        patience = max(_SILENT_SECONDS, _SILENT_STEPS * lead.seconds)
        if alive is False or (alive is None and silent > patience):
            return State.LOST
        return State.RUNNING if lead.steps else State.WAITING

    @property
    def newest(self) -> StepLine | None:
        """Return the newest step as rank 0 recorded it."""
        return self._lead.steps[-1] if self._lead is not None and self._lead.steps else None

    @property
    def step(self) -> int:
        """Return how many steps are done."""
        if self.newest is not None:
            return self.newest.step
        return self.about.resumed_at if self.about is not None else 0

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
        return self._lead.seconds if self._lead is not None and self._lead.steps else None

    @property
    def forecast(self) -> float | None:
        """Return how long the plan was predicted to take for a step, in seconds."""
        return self.about.forecast if self.about is not None else None

    @property
    def speed(self) -> tuple[float, str] | None:
        """Return how much is trained on in a second, and in which unit: samples, or for example tokens."""
        if self._lead is None or not self._lead.steps or not self._lead.wall:
            return None
        steps = self._lead.steps
        done = sum(step.batch if step.unit == "samples" else step.units for step in steps)
        return done / self._lead.wall, printable(steps[-1].unit, 20)

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
        return self.curve.points

    # What is known of its ranks.

    @property
    def members(self) -> list[Member]:
        """Return the ranks of the newest group, in order; those that record elsewhere as they have told rank 0."""
        about = self.about
        if about is None:
            return []
        found: dict[int, RankFile] = {}
        for file in self._files.values():
            same = file.about.group == about.group and file.about.time > about.time - _FORMING_SECONDS
            if same and (file.about.rank not in found or found[file.about.rank].about.time < file.about.time):
                found[file.about.rank] = file
        ranks = {rank for stage in self.plan.stages for rank in stage.ranks} | set(found)
        return [self._member(rank, found.get(rank)) for rank in sorted(ranks)]

    def _member(self, rank: int, file: RankFile | None) -> Member:
        stages = tuple(number for number, stage in enumerate(self.plan.stages) if rank in stage.ranks)
        slowdown = self.slowdowns[rank] if 0 <= rank < len(self.slowdowns) else None
        if file is not None:
            return file.member(rank, stages, slowdown)
        others, planning = self._others, self.planning
        facts = others.ranks[rank] if others is not None and 0 <= rank < len(others.ranks) else None
        same = planning is not None and planning.plan.world_size == (self.about.world_size if self.about else None)
        return told(rank, stages, slowdown, others, facts, planning if same else None)

    @property
    def timeline(self) -> tuple[int, dict[int, TimelineLine]] | None:
        """Return what the ranks did when in the newest step of which that is recorded, by rank, with the step."""
        lines = [(file.about.rank, line) for file in self._files.values() for line in file.timelines]
        if not lines:
            return None
        steps = [line.step for _, line in lines]
        newest = max(steps, key=lambda step: (steps.count(step), step))  # the one that most ranks have recorded
        return newest, {rank: line for rank, line in sorted(lines, key=lambda pair: pair[0]) if line.step == newest}

    # How records are taken up.

    def _take(self, started_as: int, line: dict[str, Any]) -> None:
        kind = line.get("kind")
        if kind == "run":
            about = self._read(RunRecord, line)
            if about is not None:
                self._describe(started_as, about)
            return
        file = self._files.get(started_as)
        if file is None:
            return
        file.note_time(line)
        leads = file is self._lead
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
            self._others = self._read(RanksLine, line) or self._others
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
            return model.model_validate(line)
        except ValidationError:
            self._unreadable += 1
            return None

    def _describe(self, started_as: int, about: RunRecord) -> None:
        before = self._files.get(started_as)
        file = self._files[started_as] = RankFile(started_as, about, before)
        if about.rank != 0 or (self._lead is not None and about.time < self._lead.about.time):
            return
        earlier, self._lead = self._lead, file
        self.slowdowns, self._slow, self._others = (), (), None
        ranks = count(about.world_size or 1, "rank")
        outcome = earlier.end.outcome if earlier is not None and earlier.end is not None else ""
        if outcome == "re-plan":
            seconds = f", predicted to take {human_seconds(about.forecast)} a step" if about.forecast else ""
            self._event(about.time, "replanned", f"goes on by another plan{seconds}")
        elif earlier is not None and about.resumed_at and outcome not in _DONE | _STOPPED:
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
                self.curve.add(step)

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
        if not isinstance(factors, list) or not all(isinstance(factor, int | float) for factor in factors):
            self._unreadable += 1
            return
        self.slowdowns = tuple(map(float, factors))
        slow = tuple(rank for rank, factor in enumerate(self.slowdowns) if factor > _SLOW)
        if slow != self._slow:
            told = ", ".join(f"rank {rank} computes {self.slowdowns[rank]:.1f} times as long" for rank in slow[:5])
            self._event(when, "slow", f"{told} as planned" if told else "all ranks are as fast as planned again")
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
