"""Tells how a run stands, from its records and while they are written: for `horizonml watch`, and for pages.

Records are read as they come, and what was read is summed up at once, so that a long run takes no more memory than a
short one. A line that is damaged, or that this version cannot read, is counted and skipped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from horizonml.errors import HorizonError
from horizonml.planner.record import FILE, Planning, read_planning
from horizonml.report.live_facts import MOST_NAME, Event, LiveRank, RankFile, RunState, Series
from horizonml.telemetry.fields import Record
from horizonml.telemetry.lifeline import is_alive
from horizonml.telemetry.log import Tails
from horizonml.telemetry.record import (
    AloneRecord,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    FollowedRecord,
    RanksRecord,
    RecoveryRecord,
    SlowdownsRecord,
    StepRecord,
    TimelineRecord,
    read,
)
from horizonml.telemetry.run_info import PlanFacts, RunInfo
from horizonml.text import count, human_seconds, printable

_DONE = {"complete", "already complete", "complete without this rank"}
_STOPPED = {"stopped", "stopped waiting"}
_MOST_EVENTS = 500
_MOST_EVALUATIONS = 5000
_FORMING_SECONDS = 60.0  # the ranks of a group describe it within this time of each other
_SILENT_SECONDS = 60.0  # without a record, after which a run counts as lost
_SILENT_STEPS = 20  # and as many steps must have been missed


class LiveRun:
    """Follows the run in a folder. Call `poll` before you look at it, as often as you like."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._tails = Tails(self.folder)
        self._unreadable = 0  # lines that are no record
        self._planned: float | None = None  # when the file had been written that `planning` was read from
        self._hosts: dict[int, str] = {}  # what devices were called last, by the rank that they were started as
        self._files: dict[int, RankFile] = {}  # by the rank that the process was started as
        self._told: dict[int, RankFile] = {}  # what the other ranks of the newest group have told rank 0, by their rank
        self._lead: RankFile | None = None  # the file of the process that is rank 0 of the newest group
        self.planning: Planning | None = None  # what the plan was made of, if the folder says it
        self.newest: StepRecord | None = None  # the last step that a rank 0 has recorded
        self.curve = Series()  # loss and accuracy of the training's batches, and the seconds of a step
        self.evaluations: deque[EvaluationRecord] = deque(maxlen=_MOST_EVALUATIONS)
        self.events: deque[Event] = deque(maxlen=_MOST_EVENTS)  # what has happened to the run, in order
        self.slowdowns: tuple[float, ...] = ()  # each rank's computing over that of the plan, as last compared
        self.alone: AloneRecord | None = None  # what each device does alone, as measured at the end of the run
        self.checkpoint: int | None = None  # the step of the newest checkpoint that was saved

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

    # Taking up records.

    def _take(self, started_as: int, line: dict[str, object]) -> None:
        try:
            record = read(line)
        except ValueError:
            self._unreadable += 1
            return
        if isinstance(record, RunInfo):
            self._describe(started_as, record)
            return
        file = self._files.get(started_as)
        if file is None or record is None:
            return
        file.take_time(record)
        match record:
            case StepRecord():
                file.step(record)
                if file is self._lead:
                    self.newest = record
                    self.curve.add(record.step, (record.loss, record.accuracy, record.wall))
            case TimelineRecord():
                file.timelines.append(record)
            case FollowedRecord():
                self._event(file.time, "joined", f"rank {file.about.rank} has caught up and works on samples")
            case EndRecord():
                file.end = record
        if file is self._lead:
            self._take_of_lead(record)

    def _take_of_lead(self, record: Record) -> None:
        """Take up what a rank 0 has recorded of the whole group."""
        match record:
            case EvaluationRecord():
                while self.evaluations and self.evaluations[-1].step >= record.step:  # it is done again
                    self.evaluations.pop()
                self.evaluations.append(record)
            case AloneRecord():
                self.alone = record
            case RecoveryRecord():
                lost = [f"{rank} ({name})" if (name := self._hosts.get(rank)) else str(rank) for rank in record.lost]
                ranks = f"rank{'s' * (len(lost) != 1)} {', '.join(lost[:20])}"
                again = f", {count(record.steps_repeated, 'step')} again" if record.steps_repeated else ""
                after = human_seconds(record.seconds)
                self._event(record.time, "lost", f"{ranks} lost; went on after {after}, from {record.source}{again}")
            case RanksRecord():
                self._take_told(record)
            case SlowdownsRecord():
                self.slowdowns = tuple(record.slowdowns)
                if record.stragglers is not None:
                    self._event(record.time, "slow", printable(record.words(), 2000))
            case CheckpointRecord(saved=True):
                self.checkpoint = record.step
            case CheckpointRecord():
                self._event(record.time, "checkpoint", "a checkpoint could not be saved")
            case EndRecord() if record.outcome not in ("re-plan", "re-form"):
                failed = record.outcome == "failed"
                words = "training failed, or lost a rank" if failed else f"training is {record.outcome}"
                self._event(record.time, "ended", printable(words, 100))

    def _describe(self, started_as: int, about: RunInfo) -> None:
        """Take up the description of a process in a new group, or with a new plan."""
        file = self._files[started_as] = RankFile(started_as, about, self._files.get(started_as))
        if about.rank != 0 or (self._lead is not None and about.time < self._lead.about.time):
            return
        earlier, self._lead = self._lead, file
        self.slowdowns = ()
        self._hosts |= {one.started_as_rank: printable(one.host, MOST_NAME) for one in about.members}
        before = {one.started_as: one for one in self._told.values()}
        self._told = {
            one.rank: RankFile(one.started_as_rank, about.of(one), before.get(one.started_as_rank), is_recorded=False)
            for one in about.members
            if one.rank != 0
        }
        ranks = count(about.world_size or 1, "rank")
        outcome = earlier.end.outcome if earlier is not None and earlier.end is not None else ""
        if outcome == "re-plan":
            seconds = f", predicted to take {human_seconds(about.forecast)} a step" if about.forecast else ""
            self._event(about.time, "replanned", f"goes on by another plan{seconds}")
        elif earlier is not None and about.resumed_at and outcome not in _DONE | _STOPPED:
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

    def _is_of_group(self, file: RankFile) -> bool:
        lead = self._lead.about if self._lead is not None else None
        return lead is not None and file.about.group == lead.group and file.about.time > lead.time - _FORMING_SECONDS

    def _take_told(self, record: RanksRecord) -> None:
        """Take up what ranks have told whose own records are elsewhere."""
        if self.newest is None:
            return
        base = replace(self.newest, step=record.step - 1, time=record.time)
        for rank, file in self._told.items():
            own = self._files.get(file.started_as)
            step = record.step_of(rank, base)
            if step is not None and (own is None or not self._is_of_group(own)):
                file.take_time(record)
                file.steps.clear()
                file.step(step)

    def _event(self, when: float, kind: str, text: str) -> None:
        self.events.append(Event(when, self.step, kind, text))

    # What is known of the run as a whole.

    @property
    def damaged(self) -> int:
        """Return how many lines of the records could not be read."""
        return self._tails.damaged + self._unreadable

    @property
    def about(self) -> RunInfo | None:
        """Return how rank 0 describes the run, or another rank if that is elsewhere; None if nothing is recorded."""
        return self._first.about if self._first is not None else None

    @property
    def _first(self) -> RankFile | None:
        """Return the records of rank 0, or the newest that are here, as on a device that has joined."""
        return self._lead or max(self._files.values(), key=lambda file: file.time, default=None)

    @property
    def name(self) -> str:
        """Return the name of the job, or of the folder if that is not recorded."""
        job = self.about.job if self.about is not None else None
        return printable((job.name if job is not None else "") or self.folder.absolute().name, 100)

    @property
    def plan(self) -> PlanFacts:
        """Return the plan that the ranks train by."""
        return self.about.plan if self.about is not None else PlanFacts()

    @property
    def layers(self) -> list[str]:
        """Return the names of the model's layers."""
        return [printable(name, 100) for name in self.about.layers] if self.about is not None else []

    @property
    def state(self) -> RunState:
        """Return whether the run goes on, and how it ended if it has."""
        lead = self._first
        if lead is None:
            return RunState.WAITING
        outcome = lead.end.outcome if lead.end is not None else None
        if outcome in _DONE:
            return RunState.FINISHED
        if outcome in _STOPPED:
            return RunState.STOPPED
        seen = [is_alive(self.folder, rank) for rank in self._files]
        alive = True if True in seen else False if False in seen else None
        if outcome == "failed" and not alive:
            return RunState.FAILED
        silent = self._clock() - max(file.time for file in self._files.values())
        patience = max(_SILENT_SECONDS, _SILENT_STEPS * lead.seconds)
        if alive is False or (alive is None and silent > patience):
            return RunState.LOST
        return RunState.RUNNING if lead.steps or self.newest is not None else RunState.WAITING

    @property
    def step(self) -> int:
        """Return how many steps are done."""
        if self._first is None:
            return 0
        return self._first.steps[-1].step if self._first.steps else self._first.about.resumed_at

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
        if self._lead is None or not self._lead.wall:
            return None
        steps = self._lead.steps
        return sum(step.trained_on for step in steps) / self._lead.wall, printable(steps[-1].unit, 20)

    @property
    def seconds_left(self) -> float | None:
        """Return for how long the remaining steps take at the present speed, or None if that is not known."""
        if self.state is not RunState.RUNNING or self.total_steps is None or self.step_seconds is None:
            return None
        return max(0, self.total_steps - self.step) * self.step_seconds

    @property
    def accuracy(self) -> float | None:
        """Return the accuracy on held-out data, else on the last batch; None where there is none."""
        held_out = self.evaluations[-1].accuracy if self.evaluations else None
        return held_out if held_out is not None else self.newest.accuracy if self.newest is not None else None

    # What is known of its ranks.

    @property
    def members(self) -> list[LiveRank]:
        """Return the ranks of the newest group, in order; those that record elsewhere as they have told rank 0."""
        found = self._members()
        stages = self.plan.stages
        ranks = {rank for stage in stages for rank in stage.ranks} | set(found)
        members = []
        for rank in sorted(ranks) if self._lead is not None else ():
            held = tuple(number for number, stage in enumerate(stages) if rank in stage.ranks)
            slowdown = self.slowdowns[rank] if 0 <= rank < len(self.slowdowns) else None
            file = found.get(rank)
            members.append(file.member(rank, held, slowdown) if file is not None else LiveRank(rank, held, slowdown))
        return members

    @property
    def splits(self) -> dict[int, Series]:
        """Return the compute, transfer and wait of the members over their steps, by rank."""
        return {rank: file.split for rank, file in self._members().items()}

    def _members(self) -> dict[int, RankFile]:
        """Return what is known of the members of the newest group, by their rank."""
        found = dict(self._told)
        for file in self._files.values():
            known = found.get(file.about.rank)
            newer = known is None or not known.is_recorded or known.about.time < file.about.time
            if newer and self._is_of_group(file):
                found[file.about.rank] = file
        return found

    @property
    def timeline(self) -> tuple[int, dict[int, TimelineRecord]] | None:
        """Return what the ranks did when in the newest step of which that is recorded, by rank, with the step."""
        lines = [(file.about.rank, line) for file in self._files.values() for line in file.timelines]
        if not lines:
            return None
        steps = [line.step for _, line in lines]
        newest = max(steps, key=lambda step: (steps.count(step), step))  # the one that most ranks have recorded
        return newest, {rank: line for rank, line in sorted(lines, key=lambda pair: pair[0]) if line.step == newest}


def _names(there: RunInfo, elsewhere: RunInfo) -> list[str]:
    """Return which members of one group another one lacks, as far as the records say who they are."""
    known = {one.started_as_rank for one in elsewhere.members}
    return [
        f"rank {one.started_as_rank} ({printable(one.host, MOST_NAME)})"
        for one in there.members
        if known and one.started_as_rank not in known
    ]
