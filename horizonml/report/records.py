"""Reads what the ranks of a run recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from horizonml.engine.clock import Kind
from horizonml.errors import HorizonError
from horizonml.machine.host import MachineInfo
from horizonml.telemetry.log import read_lines
from horizonml.telemetry.record import Source

_WARM_UP = 3  # the first steps pay for caches and connections


class _Facts(BaseModel):
    """A part of a record; what this version does not know is kept, so that it is written and compared, too."""

    model_config = ConfigDict(extra="allow", frozen=True)


class ModelFacts(_Facts):
    """The model of a recorded job."""

    name: str


class DataFacts(_Facts):
    """The data set of a recorded job."""

    name: str
    image_size: int | None = None


class JobFacts(_Facts):
    """A recorded job, which may have been checked by another version."""

    model: ModelFacts
    data: DataFacts
    batch_size: int
    epochs: int = 1
    seed: int = 0


class StageFacts(_Facts):
    """A stage of a recorded plan."""

    start: int = 0  # its first layer
    stop: int = 0  # the layer after its last one
    ranks: list[int]


class PlanFacts(_Facts):
    """A recorded plan."""

    stages: list[StageFacts] = []
    micro_batches: int = 1
    schedule: str = ""


class RunRecord(BaseModel):
    """A rank's description of the run, as its file holds it before the steps that it describes."""

    model_config = ConfigDict(frozen=True)

    time: float = 0.0
    generation: int | None = None
    world_size: int | None = None
    rank: int = 0
    started_as_rank: int | None = None
    stage: int = 0
    host: str = ""  # the host's name
    node: str | None = None  # the host's identity, which older records lack
    cores: float = 1.0
    memory: float | None = None
    threads: int | None = None
    rss_idle_bytes: int = 0
    forecast: float | None = None  # predicted seconds of a step
    machine: MachineInfo | None = None
    versions: dict[str, str] = {}
    job: JobFacts | None = None
    plan: PlanFacts = PlanFacts()

    @property
    def group(self) -> tuple[int | None, int | None]:
        """Return what the descriptions of one group's ranks have in common."""
        return self.generation, self.world_size

    @property
    def setting(self) -> tuple[int, int | None, PlanFacts]:
        """Return what steps must share to be timed together."""
        return self.rank, self.world_size, self.plan


class StepLine(BaseModel):
    """One step as one rank recorded it. Seconds, bytes and joules; shares and accuracies from 0 to 1."""

    model_config = ConfigDict(frozen=True)

    step: int
    epoch: int
    wall: float
    compute: float
    transfer: float
    wait: float
    batch: int
    loss: float
    accuracy: float | None = None
    bytes_sent: int
    links: dict[str, tuple[int, int]] = {}  # bytes sent and received, by direction
    cpu_seconds: float
    rss_bytes: int
    joules: float | None = None
    divergence: float | None = None
    gradient_norm: float | None = None  # before clipping

    def seconds(self, kind: Kind) -> float:
        """Return the seconds that went to one kind of time."""
        return {"compute": self.compute, "transfer": self.transfer, "wait": self.wait}[kind]


class EvaluationLine(BaseModel):
    """An evaluation on held-out data."""

    model_config = ConfigDict(frozen=True)

    step: int
    epoch: int
    loss: float
    accuracy: float | None = None
    within_epoch: bool = False
    best: bool = False  # whether the checkpoint of this step is kept as the best one


class RecoveryLine(BaseModel):
    """How training went on after ranks were lost, as a rank that survived recorded it."""

    model_config = ConfigDict(frozen=True)

    time: float
    generation: int
    lost: list[int]
    silent_seconds: float | None = None
    seconds: float
    steps_repeated: int
    source: Source


class SpanLine(NamedTuple):
    """What a rank did at a time, in seconds of its own clock."""

    kind: Kind
    what: str
    micro: int  # the micro-batch, or -1
    begin: float
    end: float


class TimelineLine(BaseModel):
    """What a rank did when during one step."""

    model_config = ConfigDict(frozen=True)

    step: int
    spans: list[SpanLine]


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

    @property
    def settled(self) -> list[StepLine]:
        """Return the timed steps without the first few, as far as there are more."""
        return self.timed[min(_WARM_UP, len(self.timed) // 2) :]


@dataclass
class Run:
    """The ranks of the newest group that trained, in the order of their ranks in that group."""

    name: str
    ranks: list[RankRecords]

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
    files = sorted(folder.glob("rank-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
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
    return Run(name, [members[number] for number in sorted(members)])


def _load_rank(path: Path) -> tuple[RankRecords, RunRecord]:
    """Return a rank's records, and the newest description of it, whether steps follow it or not."""
    last = run = RunRecord()
    steps: dict[int, tuple[StepLine, RunRecord]] = {}  # a step that was lost and done again counts once
    evaluations: list[EvaluationLine] = []
    timelines: list[tuple[TimelineLine, RunRecord]] = []
    recoveries: list[RecoveryLine] = []
    for record in _read_records(path):
        match record:
            case RunRecord():
                last = record
            case StepLine():
                run = last
                steps[record.step] = record, last
            case EvaluationLine():
                evaluations.append(record)
            case TimelineLine():
                timelines.append((record, last))
            case RecoveryLine():
                recoveries.append(record)
    ordered = [steps[number] for number in sorted(steps)]
    timed = [step for step, about in ordered if about.setting == run.setting]
    spans = [line for line, about in timelines if about.setting == run.setting]
    return RankRecords(run, [step for step, _ in ordered], timed, _newest(evaluations), spans, recoveries), last


Record = RunRecord | StepLine | EvaluationLine | TimelineLine | RecoveryLine
_KINDS: dict[str, type[Record]] = {
    "run": RunRecord,
    "step": StepLine,
    "evaluation": EvaluationLine,
    "timeline": TimelineLine,
    "recovery": RecoveryLine,
}


def _read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file whose kind is known. Raises HorizonError."""
    for line in read_lines(path):
        kind = _KINDS.get(str(line.get("kind")))
        if kind is None:
            continue
        try:
            yield kind.model_validate(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise HorizonError(
                f"{path}: a record of kind {line['kind']} cannot be read: {where}: {first['msg']}"
            ) from None


_Line = TypeVar("_Line", StepLine, EvaluationLine)


def _newest(lines: Iterable[_Line]) -> list[_Line]:
    """Return the last record of each step, in the order of the steps."""
    found = {line.step: line for line in lines}
    return [found[number] for number in sorted(found)]
