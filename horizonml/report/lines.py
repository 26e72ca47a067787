"""Describes and reads the lines of a rank's file, as far as reports use them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from horizonml.engine.clock import Kind
from horizonml.errors import HorizonError
from horizonml.machine.host import MachineInfo
from horizonml.telemetry.log import read_lines
from horizonml.telemetry.record import Source


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
    steps: int | None = None
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


class MemberFacts(BaseModel):
    """Who a rank of the group is, as every rank records it of all; `started_as_rank` is its number in reports."""

    model_config = ConfigDict(frozen=True)

    rank: int
    started_as_rank: int
    host: str = ""
    node: str | None = None
    cores: float = 1.0
    memory: float | None = None
    machine: MachineInfo | None = None


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
    unigram: float | None = None  # the perplexity that the frequencies of tokens alone would reach on a held-out text
    resumed_at: int = 0  # steps that were completed before
    total_steps: int | None = None  # of the whole run, which older records lack
    total_epochs: int | None = None
    machine: MachineInfo | None = None
    versions: dict[str, str] = {}
    job: JobFacts | None = None
    plan: PlanFacts = PlanFacts()
    layers: list[str] = []  # their names
    members: list[MemberFacts] = []  # all ranks of the group, which older records lack

    def of(self, member: MemberFacts) -> RunRecord:
        """Return what another member of the group would have recorded in place of this."""
        stage = next((number for number, one in enumerate(self.plan.stages) if member.rank in one.ranks), -1)
        return self.model_copy(update={**dict(member), "stage": stage, "threads": None})

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
    time: float = 0.0  # when it ended, Unix time
    wall: float
    compute: float
    transfer: float
    wait: float
    batch: int
    loss: float
    accuracy: float | None = None
    samples: int = 0  # of the batch that this rank worked on
    unit: str = "samples"  # what the loss is a mean over
    units: int = 0  # in the global batch
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
    time: float = 0.0  # when it ended, Unix time
    loss: float
    accuracy: float | None = None
    perplexity: float | None = None
    within_epoch: bool = False
    best: bool = False  # whether the checkpoint of this step is kept as the best one


class RecoveryLine(BaseModel):
    """How training went on after ranks were lost, as a rank that survived recorded it."""

    model_config = ConfigDict(frozen=True)

    time: float
    generation: int
    lost: list[int]  # as they were started
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


_Amount = Annotated[float, Field(ge=0, le=1e15)]


class OtherFacts(BaseModel):
    """How a rank fares, as it has told rank 0: sums over some steps. Older records have means, and no `steps`."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    steps: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    wall: _Amount = 0.0
    compute: _Amount = 0.0
    transfer: _Amount = 0.0
    wait: _Amount = 0.0
    cpu_seconds: _Amount = 0.0
    rss_bytes: _Amount = 0.0  # the most of them
    links: dict[str, tuple[_Amount, _Amount]] = {}  # bytes sent and received, by direction


class RanksLine(BaseModel):
    """How all ranks fare, as rank 0 records it: other ranks may record in folders of their own."""

    model_config = ConfigDict(frozen=True)

    step: int  # in whose agreement they told it: it is of the steps before
    time: float
    ranks: list[OtherFacts | None]  # None for one that has told nothing

    def step_of(self, rank: int, base: StepLine) -> StepLine | None:
        """Return the mean of the steps of which a rank has told, as its record of the step that rank 0 calls `base`."""
        facts = self.ranks[rank] if 0 <= rank < len(self.ranks) else None
        if facts is None or not facts.steps or not facts.wall:
            return None
        links = {way: (int(sent / facts.steps), int(back / facts.steps)) for way, (sent, back) in facts.links.items()}
        parts = {name: getattr(facts, name) / facts.steps for name in ("wall", "compute", "transfer", "wait")}
        unknown = dict.fromkeys(("joules", "divergence", "gradient_norm"))
        return base.model_copy(
            update={
                **parts,
                **unknown,
                "samples": 0,
                "cpu_seconds": facts.cpu_seconds / facts.steps,
                "rss_bytes": int(facts.rss_bytes),
                "bytes_sent": sum(sent for sent, _ in links.values()),
                "links": links,
            }
        )


class EndLine(BaseModel):
    """The end of what a rank recorded with one plan."""

    model_config = ConfigDict(frozen=True)

    outcome: str = ""


Record = RunRecord | StepLine | EvaluationLine | TimelineLine | RecoveryLine | RanksLine | EndLine
_KINDS: dict[str, type[Record]] = {
    "run": RunRecord,
    "step": StepLine,
    "evaluation": EvaluationLine,
    "timeline": TimelineLine,
    "recovery": RecoveryLine,
    "ranks": RanksLine,
    "end": EndLine,
}


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file whose kind is known. Raises HorizonError."""
    try:
        yield from _records(path)
    except (OSError, ValueError) as error:
        raise HorizonError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _records(path: Path) -> Iterator[Record]:
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
