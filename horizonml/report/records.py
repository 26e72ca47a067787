"""Reads what the ranks of a run recorded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from horizonml.errors import HorizonError
from horizonml.report.history import History, Stretch, history
from horizonml.report.lines import (
    EndLine,
    EvaluationLine,
    MemberFacts,
    RanksLine,
    RecoveryLine,
    RunRecord,
    StageFacts,
    StepLine,
    TimelineLine,
    read_records,
)

_WARM_UP = 3  # the first steps pay for caches and connections


@dataclass
class RankRecords:
    """One rank's file, by kind of record.

    `run` describes the newest attempt that trained: a rank that resumes a finished run, or is lost before its first
    step, writes a description that no steps follow, and that says nothing about the steps before it. `timed` are the
    steps that were made as `run` describes them: by the same rank, by the same plan, among as many others.
    """

    run: RunRecord
    steps: list[StepLine] = field(default_factory=list)
    timed: list[StepLine] = field(default_factory=list)
    evaluations: list[EvaluationLine] = field(default_factory=list)
    timelines: list[TimelineLine] = field(default_factory=list)
    recoveries: list[RecoveryLine] = field(default_factory=list)  # of all attempts, in the order of time
    stretches: list[Stretch] = field(default_factory=list)  # what was recorded of each group, nothing left out
    told: list[tuple[RanksLine, RunRecord]] = field(default_factory=list)  # what all ranks have told, on rank 0
    is_recorded: bool = True  # whether these are the rank's own records, and not what it has told rank 0

    @property
    def settled(self) -> list[StepLine]:
        """Return the timed steps without the first few, as far as there are more."""
        return self.timed[min(_WARM_UP, len(self.timed) // 2) :]


@dataclass
class Run:
    """The ranks of the newest group that trained, in the order of their ranks in that group."""

    name: str
    ranks: list[RankRecords]
    history: History = field(default_factory=History)  # of all groups that trained

    @property
    def lead(self) -> RankRecords:
        """Return the records of rank 0."""
        return self.ranks[0]

    @cached_property
    def steps(self) -> list[StepLine]:
        """Return every step of the run once, as the lowest rank that was there recorded it."""
        return _newest(step for rank in reversed(self.ranks) for step in rank.steps)

    @cached_property
    def evaluations(self) -> list[EvaluationLine]:
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


def load_run(name: str, folder: Path) -> Run:
    """Read the records of a run. Raises HorizonError if there are none that can be used.

    Files are named by the rank that a process started as. When ranks were lost, or a run was resumed with other ranks,
    only the files of the newest group count, ordered by the ranks that they had in it. A rank that has recorded
    elsewhere is as it has told rank 0.
    """
    named = (path for path in folder.glob("rank-*.jsonl") if re.fullmatch(r"rank-\d{1,9}", path.stem, re.ASCII))
    files = sorted(named, key=lambda path: int(path.stem.partition("-")[2]))
    if not files:
        raise HorizonError(f"{folder} has no records of a run (rank-*.jsonl)")
    loaded = {path: _load_rank(path) for path in files}
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
    return Run(
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
        steps: dict[int, tuple[StepLine, RunRecord]] = {}
        for line, about in lead.told:
            then = next((one for one in about.members if one.started_as_rank == member.started_as_rank), None)
            if then is not None:
                steps |= {step.step: (step, about.of(then)) for step in _told_steps(line, then, base)}
        done = [steps[number] for number in sorted(steps)]
        timed = [step for step, about in done if about.setting == run.setting]
        if timed:
            yield member.rank, RankRecords(run, [step for step, _ in done], timed, is_recorded=False)


def _told_steps(line: RanksLine, member: MemberFacts, base: dict[int, StepLine]) -> Iterator[StepLine]:
    """Yield the steps that a line sums up for a member, each as their mean; `base` has those of rank 0."""
    facts = line.ranks[member.rank] if 0 <= member.rank < len(line.ranks) else None
    for number in range(line.step - facts.steps, line.step) if facts is not None else ():
        step = line.step_of(member.rank, base[number]) if number in base else None
        if step is not None:
            yield step


def _load_rank(path: Path) -> tuple[RankRecords, RunRecord]:
    """Return a rank's records, and the newest description of it, whether steps follow it or not."""
    last = run = RunRecord()
    steps: dict[int, tuple[StepLine, RunRecord]] = {}  # a step that was lost and done again counts once
    evaluations: list[EvaluationLine] = []
    timelines: list[tuple[TimelineLine, RunRecord]] = []
    stretches = [Stretch(last)]
    told: list[tuple[RanksLine, RunRecord]] = []
    replans = False  # whether the same group goes on with another plan
    for record in read_records(path):
        match record:
            case RunRecord():
                last = record
                if not replans:
                    stretches.append(Stretch(record))
            case StepLine():
                run = last
                steps[record.step] = record, last
                stretches[-1].done.append(record)
            case EvaluationLine():
                evaluations.append(record)
                stretches[-1].done.append(record)
            case TimelineLine():
                timelines.append((record, last))
            case RecoveryLine():
                stretches[-1].recoveries.append(record)
            case RanksLine():
                told.append((record, last))
        replans = isinstance(record, EndLine) and record.outcome == "re-plan"
    ordered = [steps[number] for number in sorted(steps)]
    timed = [step for step, about in ordered if about.setting == run.setting]
    spans = [line for line, about in timelines if about.setting == run.setting]
    recoveries = [line for part in stretches for line in part.recoveries]
    done = [step for step, _ in ordered]
    return RankRecords(run, done, timed, _newest(evaluations), spans, recoveries, stretches, told), last


_Line = TypeVar("_Line", StepLine, EvaluationLine)


def _newest(lines: Iterable[_Line]) -> list[_Line]:
    """Return the last record of each step, in the order of the steps."""
    found = {line.step: line for line in lines}
    return [found[number] for number in sorted(found)]
