"""Reads what the ranks of a run recorded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from horizonml.errors import HorizonError
from horizonml.report.history import History, Stretch, history
from horizonml.report.lines import (
    EndLine,
    EvaluationLine,
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
    def stages(self) -> list[StageFacts]:
        """Return the plan's stages."""
        return self.lead.run.plan.stages


def load_run(name: str, folder: Path) -> Run:
    """Read the records of a run. Raises HorizonError if there are none that can be used.

    Files are named by the rank that a process started as. When ranks were lost, or a run was resumed with other ranks,
    only the files of the newest group count, ordered by the ranks that they had in it.
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
    return Run(
        name,
        [members[number] for number in sorted(members)],
        history(rank.stretches for rank, _ in loaded.values()),
    )


def _load_rank(path: Path) -> tuple[RankRecords, RunRecord]:
    """Return a rank's records, and the newest description of it, whether steps follow it or not."""
    last = run = RunRecord()
    steps: dict[int, tuple[StepLine, RunRecord]] = {}  # a step that was lost and done again counts once
    evaluations: list[EvaluationLine] = []
    timelines: list[tuple[TimelineLine, RunRecord]] = []
    stretches = [Stretch(last)]
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
        replans = isinstance(record, EndLine) and record.outcome == "re-plan"
    ordered = [steps[number] for number in sorted(steps)]
    timed = [step for step, about in ordered if about.setting == run.setting]
    spans = [line for line, about in timelines if about.setting == run.setting]
    recoveries = [line for part in stretches for line in part.recoveries]
    done = [step for step, _ in ordered]
    return RankRecords(run, done, timed, _newest(evaluations), spans, recoveries, stretches), last


_Line = TypeVar("_Line", StepLine, EvaluationLine)


def _newest(lines: Iterable[_Line]) -> list[_Line]:
    """Return the last record of each step, in the order of the steps."""
    found = {line.step: line for line in lines}
    return [found[number] for number in sorted(found)]
