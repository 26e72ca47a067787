"""Reads what the ranks of a run recorded: their records, and how their group changed and what that cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from horizonml.errors import HorizonError
from horizonml.planner.worth import Worth
from horizonml.telemetry.fields import Record
from horizonml.telemetry.goodput import Goodput
from horizonml.telemetry.log import rank_files, read_records
from horizonml.telemetry.record import (
    AloneRecord,
    EndRecord,
    EvaluationRecord,
    RanksRecord,
    RecoveryRecord,
    StateSource,
    StepRecord,
    TimelineRecord,
)
from horizonml.telemetry.run_info import RunInfo, StageFacts
from horizonml.text import printable

# The ranks of a group describe it within this time of each other. A later group with the same number belongs to a job
# that was started again as a whole, which counts its groups from the beginning.
_FORMING_SECONDS = 60.0
_MOST_NAME = 64  # characters of a device's name


@dataclass
class Stretch:
    """What one file records of one group."""

    about: RunInfo
    done: list[StepRecord | EvaluationRecord] = field(default_factory=list)
    recoveries: list[RecoveryRecord] = field(default_factory=list)

    @property
    def steps(self) -> list[StepRecord]:
        """Return the steps in the order in which they were done."""
        return [line for line in self.done if isinstance(line, StepRecord)]


@dataclass
class TrainedGroup:
    """A group that trained. Ranks are called by the numbers that they were started with."""

    generation: int
    time: float  # of its first description
    parts: dict[int, Stretch] = field(default_factory=dict)  # what each of its ranks recorded of it

    @property
    def ranks(self) -> dict[int, str]:
        """Return its ranks, and what their devices are called: all of them where a record says so."""
        told = {one.started_as_rank: one.host for part in self.parts.values() for one in part.about.members}
        return told or {rank: part.about.host for rank, part in self.parts.items()}

    @property
    def done(self) -> list[StepRecord | EvaluationRecord]:
        """Return what was done, as the rank recorded it that has recorded most."""
        return max((self.parts[rank] for rank in sorted(self.parts)), key=lambda part: len(part.steps)).done

    @property
    def steps(self) -> list[StepRecord]:
        """Return the steps of the group in their order."""
        return [line for line in self.done if isinstance(line, StepRecord)]

    @property
    def begin(self) -> float:
        """Return when its first step began, Unix time."""
        return self.steps[0].time - self.steps[0].wall

    @property
    def end(self) -> float:
        """Return when its last step or evaluation ended, Unix time."""
        return self.done[-1].time


@dataclass(frozen=True)
class Change:
    """The step from one group to the next. Ranks are called by the numbers that they were started with."""

    step: int  # the first one of the new group
    ranks: int  # in the new group
    lost: list[int]
    left: list[int]  # politely, or without a survivor that could tell
    joined: list[int]
    before: float  # when the last step or evaluation before it ended, Unix time
    after: float  # when the next step began
    stopped: float  # seconds without a step between the two
    steps_repeated: int
    silent_seconds: float | None = None  # for which the lost ranks had been silent when that was noticed, if known
    recovery_seconds: float | None = None  # from then to the end of the next step, for the slowest survivor
    source: StateSource | None = None  # where the state of the lost ranks came from
    names: Mapping[int, str] = field(default_factory=dict)  # what the devices of all these ranks are called


def describe(change: Change) -> str:
    """Return which ranks were lost, left and joined: "ranks 0 (pi-1), 2 (pi-2) lost, rank 1 (laptop) joined"."""

    def named(rank: int) -> str:
        return f"{rank} ({printable(name, _MOST_NAME)})" if (name := change.names.get(rank)) else str(rank)

    texts = [
        f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(named, ranks))} {what}"
        for ranks, what in ((change.lost, "lost"), (change.left, "left"), (change.joined, "joined"))
        if ranks
    ]
    return ", ".join(texts) or "same ranks, formed anew"


@dataclass(frozen=True)
class History:
    """How the group of a run changed."""

    attempts: list[list[TrainedGroup]] = field(default_factory=list)  # one each time the whole job was started
    changes: list[Change] = field(default_factory=list)
    seconds: float = 0.0  # of all attempts
    goodput: float | None = None  # the share of these that faults and changes have not taken

    @property
    def lost(self) -> int:
        """Return how many times a rank was lost."""
        return sum(len(change.lost) for change in self.changes)

    @property
    def joined(self) -> int:
        """Return how many times a rank joined while others trained."""
        return sum(len(change.joined) for change in self.changes)

    @property
    def stopped(self) -> float:
        """Return for how many seconds there were no steps because the group changed."""
        return sum(change.stopped for change in self.changes)

    @property
    def steps_repeated(self) -> int:
        """Return how many steps were done again."""
        return sum(change.steps_repeated for change in self.changes)


def history(files: Iterable[Sequence[Stretch]]) -> History:
    """Return how the group of a run changed, from the files of all ranks that were ever in it."""
    attempts: list[list[TrainedGroup]] = []
    for group in _groups(part for file in files for part in file):
        if not attempts or group.generation <= attempts[-1][-1].generation:
            attempts.append([])
        attempts[-1].append(group)
    changes: list[Change] = []
    seconds = lost = 0.0
    for groups in attempts:
        account = Goodput()
        _follow(account, groups[0])
        for old, new in pairwise(groups):
            stopped = account.lost(old.end)["outage"]
            account.broke()
            _follow(account, new)
            changes.append(_change(old, new, account.lost(new.end)["outage"] - stopped))
        seconds += groups[-1].end - groups[0].begin
        lost += sum(account.lost(groups[-1].end).values())
    return History(attempts, changes, seconds, max(0.0, 1 - lost / seconds) if seconds > 0 else None)


def _groups(parts: Iterable[Stretch]) -> Iterator[TrainedGroup]:
    found: list[TrainedGroup] = []
    for part in sorted(parts, key=lambda part: part.about.time):
        if part.about.generation is None:
            continue  # written by a version that did not count groups
        same = [
            group
            for group in found
            if group.generation == part.about.generation
            and part.about.started_as not in group.parts
            and part.about.time - group.time < _FORMING_SECONDS
        ]
        if not same:
            same = [TrainedGroup(part.about.generation, part.about.time)]
            found += same
        same[-1].parts[part.about.started_as] = part
    for group in found:
        if any(part.steps for part in group.parts.values()):
            yield group


def _follow(account: Goodput, group: TrainedGroup) -> None:
    for line in group.done:
        if isinstance(line, StepRecord):
            account.step(line.step, line.wall, line.time)
        else:
            account.got_on(line.time)


def _change(old: TrainedGroup, new: TrainedGroup, stopped: float) -> Change:
    # A rank that was only taken for lost records its own return, which says nothing about those that went on.
    stayed = {rank: part for rank, part in new.parts.items() if rank in old.parts}
    told = [line for rank, part in stayed.items() for line in part.recoveries if rank not in line.lost]
    lost = sorted({rank for line in told for rank in line.lost})
    first, names = new.steps[0].step, old.ranks | new.ranks
    silent = [line.silent_seconds for line in told if line.silent_seconds is not None]
    return Change(
        step=first,
        ranks=len(new.ranks),
        lost=lost,
        left=sorted(old.ranks.keys() - new.ranks.keys() - set(lost)),
        joined=sorted(new.ranks.keys() - old.ranks.keys()),
        before=old.end,
        after=new.begin,
        stopped=stopped,
        steps_repeated=sum(step.step >= first for step in old.steps),
        silent_seconds=max(silent, default=None),
        recovery_seconds=max((line.seconds for line in told), default=None),
        source=max((line.source for line in told), key=list(StateSource).index, default=None),
        names=names if len(set(names.values())) > 1 else {},
    )


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
    alone: AloneRecord | None = None  # what each device does alone, on rank 0 at the end of a run
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
    def worth(self) -> Worth | None:
        """Return what the devices do together and alone; None if the run has not ended, or has a single rank."""
        found = self.lead.alone
        return Worth(found.together, found.alone, found.names) if found is not None else None

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
    alone: AloneRecord | None = None
    replans = False  # whether the same group goes on with another plan
    for record in read_records(path):
        match record:
            case RunInfo():
                last, alone = record, None
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
            case AloneRecord():
                alone = record
        replans = isinstance(record, EndRecord) and record.outcome == "re-plan"
    spans = [line for line, about in timelines if about.setting == run.setting]
    recoveries = [line for part in stretches for line in part.recoveries]
    return RankRecords(run, *_timed(run, steps), _newest(evaluations), spans, recoveries, stretches, told, alone), last


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
