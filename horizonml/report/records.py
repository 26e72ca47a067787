"""Reads what the ranks of a run recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from horizonml.errors import HorizonError
from horizonml.report.history import History, Stretch, history
from horizonml.telemetry.fields import Record
from horizonml.telemetry.log import rank_files, read_records
from horizonml.telemetry.record import (
    EndRecord,
    EvaluationRecord,
    RanksRecord,
    RecoveryRecord,
    StepRecord,
    TimelineRecord,
)
from horizonml.telemetry.run_info import RunInfo, StageFacts

_WARM_UP = 3  # the first steps pay for caches and connections


@dataclass
class RankRecords:
    """One rank's file, by kind of record.

    `run` describes the newest attempt that trained: a rank that resumes a finished run, or is lost before its first
    step, writes a description that no steps follow, and that says nothing about the steps before it. `timed` are the
    steps that were made as `run` describes them: by the same rank, by the same plan, among as many others.
    """

    run: RunInfo
    steps: list[StepRecord] = field(default_factory=list)
    timed: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    timelines: list[TimelineRecord] = field(default_factory=list)
    recoveries: list[RecoveryRecord] = field(default_factory=list)  # of all attempts, in the order of time
    stretches: list[Stretch] = field(default_factory=list)  # what was recorded of each group, nothing left out
    told: list[tuple[RanksRecord, RunInfo]] = field(default_factory=list)  # what all ranks have told, on rank 0
    is_recorded: bool = True  # whether these are the rank's own records, and not what it has told rank 0

    @property
    def settled(self) -> list[StepRecord]:
        """Return the timed steps without the first few, as far as there are more."""
        return self.timed[min(_WARM_UP, len(self.timed) // 2) :]


@dataclass
class RecordedRun:
    """The ranks of the newest group that trained, in the order of their ranks in that group."""

    name: str
    ranks: list[RankRecords]
    history: History = field(default_factory=History)  # of all groups that trained

    @property
    def lead(self) -> RankRecords:
        """Return the records of rank 0."""
        return self.ranks[0]

    @cached_property
    def steps(self) -> list[StepRecord]:
        """Return every step of the run once, as the lowest rank that was there recorded it."""
        return _newest(step for rank in reversed(self.ranks) for step in rank.steps)

    @cached_property
    def evaluations(self) -> list[EvaluationRecord]:
        """Return every evaluation once, in the same way."""
        return _newest(one for rank in reversed(self.ranks) for one in rank.evaluations)

    @property
    def missing(self) -> list[int]:
        """Return the ranks of whose steps these records say nothing."""
        known = {rank.run.rank for rank in self.ranks}
        return [member.rank for member in self.lead.run.members if member.rank not in known]

    @property
    def stages(self) -> list[StageFacts]:
        """Return the plan's stages."""
        return self.lead.run.plan.stages


def load_run(name: str, folder: Path) -> RecordedRun:
    """Read the records of a run. Raises HorizonError if there are none that can be used.

    Files are named by the rank that a process started as. When ranks were lost, or a run was resumed with other ranks,
    only the files of the newest group count, ordered by the ranks that they had in it. A rank that has recorded
    elsewhere is as it has told rank 0.
    """
    files = rank_files(folder)
    if not files:
        raise HorizonError(f"{folder} has no records of a run (rank-*.jsonl)")
    loaded = {path: _load_rank(path) for path in files.values()}
    trained = [rank for rank, _ in loaded.values() if rank.steps]
    newest = max((rank.run for rank in trained), key=lambda run: run.time, default=None)
    members: dict[int, RankRecords] = {}
    for path, (rank, last) in loaded.items():
        if not rank.steps and (newest is None or last.group == newest.group):
            raise HorizonError(f"{path} has no steps: the run ended before its first one was through")
        if newest is not None and rank.steps and rank.run.group == newest.group:
            number = rank.run.rank
            members[number] = max(members.get(number, rank), rank, key=lambda one: one.run.time)
    for number, told in _elsewhere(members.get(0)):
        members.setdefault(number, told)
    return RecordedRun(
        name,
        [members[number] for number in sorted(members)],
        history(rank.stretches for rank, _ in loaded.values()),
    )


def _elsewhere(lead: RankRecords | None) -> Iterator[tuple[int, RankRecords]]:
    """Yield what the ranks of the newest group have told rank 0 of their steps, with their numbers in the group."""
    if lead is None:
        return
    base = {step.step: step for step in lead.steps}
    for member in lead.run.members:
        run = lead.run.of(member)
        steps: dict[int, tuple[StepRecord, RunInfo]] = {}
        for told, about in lead.told:
            then = next((one for one in about.members if one.started_as_rank == member.started_as_rank), None)
            if then is not None:
                steps |= {step.step: (step, about.of(then)) for step in _told_steps(told, then.rank, base)}
        if any(about.setting == run.setting for _, about in steps.values()):
            yield member.rank, RankRecords(run, *_timed(run, steps), is_recorded=False)


def _told_steps(told: RanksRecord, rank: int, base: dict[int, StepRecord]) -> Iterator[StepRecord]:
    """Yield the steps that a record sums up for a rank, each as their mean; `base` has those of rank 0."""
    facts = told.ranks[rank] if 0 <= rank < len(told.ranks) else None
    if facts is None or not base:
        return
    for number in range(max(min(base), told.step - facts.steps), min(max(base) + 1, told.step)):
        step = told.step_of(rank, base[number]) if number in base else None
        if step is not None:
            yield step


def _timed(run: RunInfo, steps: dict[int, tuple[StepRecord, RunInfo]]) -> tuple[list[StepRecord], list[StepRecord]]:
    """Return the steps in order, and those of them that were made as `run` describes them."""
    ordered = [steps[number] for number in sorted(steps)]
    return [step for step, _ in ordered], [step for step, about in ordered if about.setting == run.setting]


def _load_rank(path: Path) -> tuple[RankRecords, RunInfo]:
    """Return a rank's records, and the newest description of it, whether steps follow it or not."""
    last = run = RunInfo()
    steps: dict[int, tuple[StepRecord, RunInfo]] = {}  # a step that was lost and done again counts once
    evaluations: list[EvaluationRecord] = []
    timelines: list[tuple[TimelineRecord, RunInfo]] = []
    stretches = [Stretch(last)]
    told: list[tuple[RanksRecord, RunInfo]] = []
    replans = False  # whether the same group goes on with another plan
    for record in read_records(path):
        match record:
            case RunInfo():
                last = record
                if not replans:
                    stretches.append(Stretch(record))
            case StepRecord():
                run = last
                steps[record.step] = record, last
                stretches[-1].done.append(record)
            case EvaluationRecord():
                evaluations.append(record)
                stretches[-1].done.append(record)
            case TimelineRecord():
                timelines.append((record, last))
            case RecoveryRecord():
                stretches[-1].recoveries.append(record)
            case RanksRecord():
                told.append((record, last))
        replans = isinstance(record, EndRecord) and record.outcome == "re-plan"
    spans = [line for line, about in timelines if about.setting == run.setting]
    recoveries = [line for part in stretches for line in part.recoveries]
    return RankRecords(run, *_timed(run, steps), _newest(evaluations), spans, recoveries, stretches, told), last


_Record = TypeVar("_Record", StepRecord, EvaluationRecord)


def _newest(records: Iterable[_Record]) -> list[_Record]:
    found = {one.step: one for one in records}
    return [found[number] for number in sorted(found)]


def lead_records(folder: Path) -> list[Record]:
    """Return what rank 0 recorded, whichever process that was, in the order of time; every step and evaluation once.

    Of a step that was lost and done again, the last record counts. Steps and evaluations that no rank 0 recorded here
    are as any rank did. Raises HorizonError if a file cannot be read.
    """
    found: list[tuple[bool, float, Record]] = []
    for path in rank_files(folder).values():
        leads = False
        for record in read_records(path):
            if isinstance(record, RunInfo):
                leads = record.rank == 0
            if isinstance(record, TimelineRecord):
                continue  # which has no time
            if leads or isinstance(record, RunInfo | StepRecord | EvaluationRecord):
                found.append((leads, record.time, record))
    found.sort(key=lambda one: one[:2])
    is_led = bool(found) and found[-1][0]
    kept: dict[tuple[str, int], tuple[float, Record]] = {}
    for number, (leads, when, record) in enumerate(found):
        if isinstance(record, StepRecord | EvaluationRecord):
            kept[record.kind, record.step] = when, record
        elif leads or not is_led:
            kept["", number] = when, record
    return [record for _, record in sorted(kept.values(), key=lambda one: one[0])]
