"""Tells from the ranks' records how a run's group changed: which ranks were lost or joined, and what that cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from horizonml.telemetry.goodput import Goodput
from horizonml.telemetry.record import EvaluationRecord, RecoveryRecord, StateSource, StepRecord
from horizonml.telemetry.run_info import RunInfo
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
    told = [line for rank, part in new.parts.items() for line in part.recoveries if rank not in line.lost]
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
