"""Defines what is recorded of a training: a rank's place in it, one record per step, and one per evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horizonml.job.schema import Job
    from horizonml.plan.plan import Plan

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


@dataclass(frozen=True)
class RunInfo:
    """Describes what one rank trains, where, and with which plan; it is the first record of the rank's file."""

    rank: int  # in the group; the process may have been started as another one
    started_as_rank: int
    world_size: int
    generation: int  # counts the formations of the group
    host: str
    node: str  # identifies the machine
    job: Job
    layers: list[str]
    rss_idle_bytes: int  # of this process before it had a model
    threads: int
    cores: float  # that this machine's ranks may use
    memory: float  # bytes that they may use
    machine: dict[str, Any]  # as the machine describes itself
    versions: dict[str, str]
    plan: Plan
    forecast: float | None = None  # predicted seconds of a step, for an automatic plan
    resumed_at: int = 0  # steps that were completed before
    expected_memory: float | None = None  # bytes that an automatic plan expects this process to need
    unigram: float | None = None  # perplexity on a held-out text of knowing how frequent each token is, and no more
    total_steps: int | None = None  # of the whole run, unless it ends early
    total_epochs: int | None = None
    device: str = ""  # the accelerator that the rank computes on; empty for the processor
    device_memory: float | None = None  # bytes of it that the rank may use
    members: Sequence[Mapping[str, Any]] = ()  # who the ranks of the group are; see `report.lines.MemberFacts`

    @property
    def stage(self) -> int:
        """Return the rank's stage, or the first one if it holds several; -1 if it has no work."""
        return next(iter(self.plan.stages_of(self.rank)), -1)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {
            "kind": "run",
            **vars(self),
            "job": self.job.model_dump(),
            "plan": self.plan.to_json(),
            "stage": self.stage,
        }


@dataclass(frozen=True)
class StepRecord:
    """Describes one step as one rank saw it, in seconds and bytes; compute + transfer + wait = wall."""

    step: int  # counted from 1 over the whole run
    epoch: int  # counted from 1
    time: float  # when it ended, Unix time
    wall: float
    compute: float
    transfer: float
    wait: float
    samples: int  # rows of the batch this rank worked on
    batch: int  # size of the global batch
    loss: float  # mean over the global batch
    metrics: Mapping[str, float]  # the task's metrics by name, means over the global batch
    lr: float
    bytes_sent: int
    bytes_received: int
    links: Mapping[Any, tuple[int, int]]  # bytes sent and received: previous stage, next stage, members of this one
    cpu_seconds: float  # of this process, all its threads
    rss_bytes: int
    joules: float | None  # used by this machine, on its first rank only; None if the machine does not measure it
    # |g_i - g| / |g| of this member's gradient before reduction, on measured steps; with local steps, of its outer one
    divergence: float | None
    load: float = 0.0  # seconds of `wait` or `compute` in which the step could not go on without its data
    skipped: int = 0  # samples of the global batch that could not be read and were replaced
    unit: str = "samples"  # what the loss is a mean over
    units: int = 0  # in the global batch
    gradient_norm: float | None = None  # of the whole gradient before clipping; None if gradients are not clipped
    local_steps: int | None = None  # updates that this rank's replica made by itself; None without local steps

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object, in which each metric has a key of its own."""
        return {"kind": "step", **_with_metrics(vars(self))}


@dataclass(frozen=True)
class EvaluationRecord:
    """Holds the loss and the task's metrics on held-out data after an epoch, or within one."""

    step: int
    epoch: int
    time: float
    seconds: float
    loss: float
    metrics: Mapping[str, float]
    samples: int
    within_epoch: bool = False  # whether the epoch was not at its end
    best: bool = False  # whether the checkpoint of this step is kept as the best one

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object, in which each metric has a key of its own."""
        return {"kind": "evaluation", **_with_metrics(vars(self))}


Observer = Callable[[StepRecord | EvaluationRecord], None]
"""What receives the records of the first rank while it trains."""


class Source(StrEnum):
    """Tells where the state was taken from that training went on with after a loss."""

    MEMORY = "memory"  # of the ranks that survived
    REPLICA = "replica"  # the lost rank's state, as it was mirrored to another rank's memory
    DISK = "disk"  # a checkpoint
    START = "start"  # nothing was left: training begins again at step 0


@dataclass(frozen=True)
class RecoveryRecord:
    """Describes how training went on after ranks were lost, as one of those that survived saw it."""

    time: float  # when the first step of the new group ended, Unix time
    generation: int  # of the new group
    lost: list[int]  # the ranks that were lost, by the numbers that they were started with
    silent_seconds: float | None  # for which they had been silent when that was noticed, if it is known
    seconds: float  # from the moment at which the loss was known here to `time`
    steps_repeated: int  # steps done before that have to be done again
    source: Source

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {"kind": "recovery", **vars(self)}


def _with_metrics(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record with its metrics among them, in place of the field `metrics`."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name != "metrics":
            found[name] = value
            continue
        for metric, mean in value.items():
            key = metric_key(metric)
            assert key not in fields, f"a record has a field {key!r} already; rename the task's metric"
            found[key] = mean
    return found
