"""Declares what a rank records, once: each kind of record is a dataclass that is written, read, and shown from here.

`SHOWN` says for the fields of a record how they appear elsewhere: as a scalar of TensorBoard and MLflow, as a metric of
Prometheus with its panel in Grafana, and as a row of reports. `docs/extending.md` shows how to add a number.

Writing checks nothing, so that it costs little and cannot fail. Reading checks everything, since files of records come
from anywhere: `read` returns the typed record of a line, also of one that an older version wrote.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from horizonml.engine.clock import KINDS, Kind
from horizonml.telemetry.fields import (
    STEP_SECONDS,
    Amount,
    Count,
    Links,
    MetricSpec,
    PanelSpec,
    Record,
    Shown,
    Time,
    counter,
    gauge,
)
from horizonml.telemetry.run_info import RunInfo

SHARES = frozenset({"accuracy"})  # the metrics that are fractions, from 0 to 1, and are shown to people in percent


def metric_key(name: str) -> str:
    """Return the name of a task's metric in records and in Prometheus."""
    return name.replace(" ", "_").replace("-", "_")


def metric_text(name: str, value: float, digits: int = 2) -> str:
    """Return a metric's value for people: `99.16%` for a share, with `digits` digits after the point."""
    return f"{value:.{digits}%}" if name in SHARES else f"{value:.4f}"


def judged(loss: float, metrics: Mapping[str, float], unigram: float | None = None) -> str:
    """Return the loss and the task's metrics for people: `loss 0.0231, accuracy 99.16%`.

    `unigram` is the perplexity that frequencies alone would reach, and stands beside that of a language model.
    """
    words = {name: f"{name} {metric_text(name, value)}" for name, value in metrics.items()}
    if unigram is not None and "perplexity" in words:
        words["perplexity"] += f" (unigram baseline {unigram:.1f})"
    return ", ".join([f"loss {loss:.4f}", *words.values()])


# What training achieves, and what it takes.


@dataclass(frozen=True)
class _Judged(Record):
    """Is a record with the metrics of the task, each of which has a key of its own in the file."""

    prefix: ClassVar[str]  # of the metrics' names in TensorBoard, and in Prometheus with `where`
    where: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object, in which each metric has a key of its own."""
        found = super().to_json()
        for name, mean in found.pop("metrics").items():
            key = metric_key(name)
            assert key not in found, f"a record has a field {key!r} already; rename the task's metric"
            found[key] = mean
        return found


@dataclass(frozen=True)
class StepRecord(_Judged):
    """Describes one step as one rank saw it, in seconds and bytes; compute + transfer + wait = wall."""

    kind, prefix, where = "step", "train", "training"
    step: Count  # counted from 1 over the whole run
    epoch: Count  # counted from 1
    time: Time  # when it ended
    wall: Amount
    compute: Amount
    transfer: Amount
    wait: Amount
    batch: Count  # size of the global batch
    loss: float  # its mean
    bytes_sent: Count
    cpu_seconds: Amount  # of this process, all its threads
    rss_bytes: Count
    samples: Count = 0  # rows of the batch that this rank worked on
    metrics: Mapping[str, float] = field(default_factory=dict)  # the task's by name, means over the global batch
    lr: float = 0.0
    bytes_received: Count = 0
    links: Links = field(default_factory=dict)
    joules: float | None = None  # used by this machine, on its first rank only; None if the machine does not measure it
    # |g_i - g| / |g| of this member's gradient before reduction, on measured steps; with local steps, of its outer one.
    # Its metric is one of two; see `Metrics.step`.
    divergence: float | None = None
    load: Amount = 0.0  # seconds of `wait` or `compute` in which the step could not go on without its data
    skipped: Count = 0  # samples of the global batch that could not be read and were replaced
    unit: str = "samples"  # what the loss is a mean over
    units: Count = 0  # in the global batch
    gradient_norm: float | None = None  # of the whole gradient before clipping; None if gradients are not clipped
    local_steps: Count | None = None  # updates that this rank's replica made by itself; None without local steps
    ahead: bool = False  # whether its replica took the step while another one was late with a synchronisation

    @property
    def accuracy(self) -> float | None:
        """Return the accuracy on the global batch, from 0 to 1; None for a task without it."""
        return self.metrics.get("accuracy")

    @property
    def trained_on(self) -> int:
        """Return the samples of the global batch, or for example its tokens, where the loss is a mean over tokens."""
        return self.batch if self.unit == "samples" else self.units

    def seconds(self, kind: Kind) -> float:
        """Return the seconds that went to one kind of time."""
        return {"compute": self.compute, "transfer": self.transfer, "wait": self.wait}[kind]


@dataclass(frozen=True)
class EvaluationRecord(_Judged):
    """Holds the loss and the task's metrics on held-out data after an epoch, or within one."""

    kind, prefix, where = "evaluation", "held_out", "held_out"
    step: Count
    epoch: Count
    time: Time = 0.0
    seconds: Amount = 0.0
    loss: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: Count = 0
    within_epoch: bool = False  # whether the epoch was not at its end
    best: bool = False  # whether the checkpoint of this step is kept as the best one

    @property
    def accuracy(self) -> float | None:
        """Return the accuracy, from 0 to 1; None for a task without it."""
        return self.metrics.get("accuracy")

    @property
    def perplexity(self) -> float | None:
        """Return the perplexity of a language model; None for other tasks."""
        return self.metrics.get("perplexity")


Observer = Callable[[StepRecord | EvaluationRecord], None]
"""What receives the records of the first rank while it trains."""


class RecordedSpan(NamedTuple):
    """What a rank did at a time, in seconds of its own clock."""

    kind: Kind
    what: str
    micro: int  # the micro-batch, or -1
    begin: float
    end: float


@dataclass(frozen=True)
class TimelineRecord(Record):
    """Says what a rank did when during one step, in Unix time, so that several ranks can be compared."""

    kind = "timeline"
    time: ClassVar[float] = 0.0
    step: Count
    spans: Sequence[RecordedSpan]


# What happens to the group, and beside the steps.


class StateSource(StrEnum):
    """Tells where the state was taken from that training went on with after a loss."""

    MEMORY = "memory"  # of the ranks that survived
    REPLICA = "replica"  # the lost rank's state, as it was mirrored to another rank's memory
    DISK = "disk"  # a checkpoint
    START = "start"  # nothing was left: training begins again at step 0


@dataclass(frozen=True)
class RecoveryRecord(Record):
    """Describes how training went on after ranks were lost, as one of those that survived saw it."""

    kind = "recovery"
    time: Time  # when the first step of the new group ended
    generation: Count  # of the new group
    lost: Sequence[int]  # the ranks that were lost, by the numbers that they were started with
    seconds: Amount  # from when the loss was known here to `time`
    steps_repeated: Count  # steps done before that have to be done again
    source: StateSource
    silent_seconds: Amount | None = None  # for which they had been silent when that was noticed, if it is known


@dataclass(frozen=True)
class RankSums:
    """Says how a rank fares, as it has told rank 0: sums over some steps. Older records have means, and no `steps`."""

    steps: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    wall: Amount = 0.0
    compute: Amount = 0.0
    transfer: Amount = 0.0
    wait: Amount = 0.0
    cpu_seconds: Amount = 0.0
    rss_bytes: Amount = 0.0  # the most of them
    links: Mapping[str, tuple[Amount, Amount]] = field(default_factory=dict)  # bytes sent and received


@dataclass(frozen=True)
class RanksRecord(Record):
    """Says how all ranks fare, as rank 0 records it: other ranks may record in folders of their own."""

    kind = "ranks"
    step: Count  # in whose agreement they told it: it is of the steps before
    time: Time
    ranks: Sequence[RankSums | None]  # None for one that has told nothing

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {**super().to_json(), "ranks": [None if one is None else vars(one) for one in self.ranks]}

    def step_of(self, rank: int, base: StepRecord) -> StepRecord | None:
        """Return the mean of the steps of which a rank has told, as its record of the step that rank 0 calls `base`."""
        facts = self.ranks[rank] if 0 <= rank < len(self.ranks) else None
        if facts is None or not facts.steps or not facts.wall:
            return None
        links = {way: (int(sent / facts.steps), int(back / facts.steps)) for way, (sent, back) in facts.links.items()}
        return replace(
            base,
            wall=facts.wall / facts.steps,
            compute=facts.compute / facts.steps,
            transfer=facts.transfer / facts.steps,
            wait=facts.wait / facts.steps,
            joules=None,
            divergence=None,
            gradient_norm=None,
            samples=0,
            cpu_seconds=facts.cpu_seconds / facts.steps,
            rss_bytes=int(facts.rss_bytes),
            bytes_sent=sum(sent for sent, _ in links.values()),
            links=links,
        )


@dataclass(frozen=True)
class SlowdownsRecord(Record):
    """Says how many times as long as planned each rank computes, relative to the other ranks."""

    kind = "slowdowns"
    step: Count
    time: Time
    slowdowns: Sequence[Amount]  # by rank
    stragglers: Sequence[int] | None = None  # the ranks that take too long, if people should hear of it now
    reasons: Mapping[str, str] = field(default_factory=dict)  # what holds a device back, by its rank

    def words(self) -> str:
        """Return which ranks are slow, and what is known of the reasons; of very many the first."""
        slow = {str(rank): factor for rank, factor in enumerate(self.slowdowns) if rank in (self.stragglers or ())}
        because = {rank: f", because {reason[:200]}" for rank, reason in self.reasons.items()}
        told = [
            f"rank {rank} computes {factor:.1f} times as long as planned, compared with the others"
            + because.get(rank, "")
            for rank, factor in slow.items()
        ]
        told += [f"rank {rank[:10]}: {reason[:200]}" for rank, reason in self.reasons.items() if rank not in slow]
        return "; ".join(told[:5]) or "all ranks are as fast as planned again"


@dataclass(frozen=True)
class CheckpointRecord(Record):
    """Says whether a checkpoint was saved after a step."""

    kind = "checkpoint"
    step: Count
    time: Time
    saved: bool
    seconds: Amount  # for which training waited
    writing_seconds: Amount = 0.0  # for which training went on meanwhile


@dataclass(frozen=True)
class CheckpointSkippedRecord(Record):
    """Says that the checkpoint due after a step was left out, because one before was still being written."""

    kind = "checkpoint skipped"
    step: Count
    time: Time


@dataclass(frozen=True)
class FollowedRecord(Record):
    """Says that this rank works on samples from a step on, and has followed the others until then."""

    kind = "followed"
    step: Count
    time: Time
    steps: Count = 0  # that the others made meanwhile
    bytes: Count = 0  # of state that were received meanwhile; any others came while all waited


@dataclass(frozen=True)
class AloneRecord(Record):
    """Says what the devices do together and what each of them does alone, as was measured at the end of a run."""

    kind = "alone"
    time: Time
    together: Amount  # samples per second, in the last steps
    alone: Sequence[Amount | None]  # the same by device; None for one that has not enough memory
    names: Sequence[str] = ()  # of the devices


@dataclass(frozen=True)
class EndRecord(Record):
    """Is the end of what a rank recorded with one plan."""

    kind = "end"
    time: Time = 0.0
    outcome: str = ""  # why the rank stopped training with this group and plan


RECORDS: Mapping[str, type[Record]] = {
    one.kind: one
    for one in (
        RunInfo, StepRecord, EvaluationRecord, TimelineRecord, RecoveryRecord, RanksRecord, SlowdownsRecord,
        CheckpointRecord, CheckpointSkippedRecord, FollowedRecord, AloneRecord, EndRecord,
    )
}  # fmt: skip

# How fields of records are shown: as a scalar, as a metric, as a row of reports. A test adds a field to both tables.

_PHASE = MetricSpec(
    "summary",
    "step_phase_seconds",
    "A step's wall time split into compute, transfer and wait, which add up.",
    ("phase",),
    KINDS,
)
_WALL = MetricSpec("histogram", "step_duration_seconds", "Wall time of a step.", from_zero=True, buckets=STEP_SECONDS)
_LOCAL = PanelSpec(
    "Local steps per second",
    "How often does each rank's replica update its parameters by itself, between two synchronisations?",
    "suffix:steps/s",
    "No rank here takes local steps (parallel.sync)",
)
_OF_STEP = {
    "step": Shown(metric=gauge("step", "Steps of the run that are done, those before a resumption included.")),
    "epoch": Shown("train/epoch", gauge("epoch", "The epoch under way, from 1.")),
    "time": Shown(metric=gauge("last_step_timestamp_seconds", "When the newest step ended.")),
    "wall": Shown("time/step_seconds", _WALL),
    "compute": Shown("time/compute_seconds", _PHASE, "compute"),
    "transfer": Shown("time/transfer_seconds", _PHASE, "transfer"),
    "wait": Shown("time/wait_seconds", _PHASE, "wait"),
    "load": Shown(
        "time/loading_seconds",
        counter("load_seconds", "Time that steps spent getting their data: what loading ahead did not hide."),
    ),
    "loss": Shown("train/loss", gauge("training_loss", "Loss of the newest global batch.")),
    "lr": Shown("train/learning_rate", gauge("learning_rate", "Learning rate of the newest step.")),
    "gradient_norm": Shown(
        "train/gradient_norm",
        gauge("gradient_norm", "Norm of the newest step's whole gradient before clipping, where they are clipped."),
        column="gradient norm, median",
    ),
    "divergence": Shown("train/gradient_divergence"),  # whose metric is one of two; see `Metrics.step`
    "samples": Shown(metric=counter("rank_samples", "Samples that went through this rank's stage here.")),
    "skipped": Shown(
        "train/skipped_samples",
        counter("samples_skipped", "Samples that could not be read and were replaced, in global batches."),
    ),
    "local_steps": Shown(
        "rank_0/local_steps",
        counter("local_steps", "Updates that this rank's replica made by itself, with `parallel.sync`.", False),
        panel=_LOCAL,
    ),
    "ahead": Shown(
        "rank_0/ahead",
        counter("steps_ahead", "Steps that this rank's replica took while another was late (`parallel.sync.late`)."),
        panel=_LOCAL,
    ),
    "joules": Shown(
        "rank_0/joules",
        counter("energy_joules", "Energy used by the rank's machine in steps, if it tells it.", False),
    ),
    "bytes_sent": Shown("rank_0/bytes_sent"),
    "bytes_received": Shown("rank_0/bytes_received"),
    "cpu_seconds": Shown("rank_0/cpu_seconds"),
    "rss_bytes": Shown("rank_0/memory_bytes"),
}
_OF_EVALUATION = {
    "loss": Shown("held_out/loss", gauge("held_out_loss", "Loss on held-out data in the newest evaluation.")),
    "seconds": Shown("time/evaluation_seconds", gauge("evaluation_duration_seconds", "Time of the newest evaluation.")),
}
SHOWN: Mapping[type[Record], Mapping[str, Shown]] = {
    RunInfo: {"generation": Shown("group/generation"), "world_size": Shown("group/ranks")},
    StepRecord: _OF_STEP,
    EvaluationRecord: _OF_EVALUATION,
    RecoveryRecord: {
        "seconds": Shown("group/recovery_seconds"),
        "steps_repeated": Shown("group/steps_repeated"),
    },
    CheckpointRecord: {"seconds": Shown("time/checkpoint_seconds")},
}


@functools.cache
def _reader(kind: str) -> tuple[TypeAdapter[Record], frozenset[str]]:
    return TypeAdapter(RECORDS[kind]), frozenset(one.name for one in fields(RECORDS[kind])) | {"kind"}


def read(line: Mapping[str, Any]) -> Record | None:
    """Return the record of a line, or None for a kind that this version does not know.

    In a step or an evaluation, every number that is not a field is a metric of the task. Raises ValueError that names
    the field.
    """
    kind = RECORDS.get(str(line.get("kind")))
    if kind is None:
        return None
    adapter, known = _reader(kind.kind)
    if issubclass(kind, _Judged):
        numbers = {name: value for name, value in line.items() if name not in known and isinstance(value, int | float)}
        line = {**line, "metrics": {name: value for name, value in numbers.items() if not isinstance(value, bool)}}
    try:
        return adapter.validate_python(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"a record of kind {line['kind']} cannot be read: {where}: {first['msg']}") from None
