"""A job: what to train, on what data, and how the work is spread over the ranks.

This is the schema of the job file; `jobfile` reads one. Most sections are specs that stand beside what they configure.
Every field is documented there, and this text is what `horizonml validate --schema` hands to editors.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from horizonml.data.spec import DataSpec
from horizonml.models.spec import ModelSpec
from horizonml.plan.spec import Parallel
from horizonml.security.spec import SecuritySpec
from horizonml.spec.base import PlainName, Rule, Spec
from horizonml.state.spec import Adam, CheckpointSpec, Ema, LrSchedule, RecoverySpec, Sgd
from horizonml.tasks.spec import TaskSpec
from horizonml.telemetry.spec import TelemetrySpec


class RendezvousSpec(Spec):
    """Where and how the ranks meet."""

    address: Annotated[str | None, Rule("is not host:port, for example 192.168.1.10:29400", always=True)] = Field(
        None,
        pattern=r"^\[?[\w.:-]+\]?:\d+$",
        description="host:port of `horizonml rendezvous`. Default: $HORIZONML_RENDEZVOUS; alone on one machine "
        "it is started for you.",
    )
    timeout: float = Field(
        120.0,
        gt=0,
        description="Seconds to wait for the service, for all ranks, and for the machines that keep missing shards of "
        "a checkpoint.",
    )
    step_timeout: float = Field(
        300.0, gt=0, description="Seconds to wait for a peer within a step before it counts as lost."
    )
    replace_timeout: float = Field(
        0.0,
        ge=0,
        description="Seconds that the others wait for the replacement of a lost rank before they go on without it "
        "(0: go on at once; a replacement that comes later is taken in). `parallel.min_workers` says how many must be "
        "left.",
    )
    max_attempts: int = Field(
        5,
        ge=0,
        description="How often in a row ranks meet again after losing one, without finishing a step in between, "
        "before they give up (0: the first lost rank ends the job).",
    )


class EvaluateSpec(Spec):
    """Configures how often the model is evaluated on all held-out data, which always happens after the last step."""

    every_epochs: int = Field(1, ge=1, description="Epochs between two evaluations.")
    every_steps: int | None = Field(
        None, ge=1, description="Steps between two evaluations, instead of epochs (default: by epochs)."
    )


class EarlyStopSpec(Spec):
    """Configures early stopping: the end of a training whose evaluations no longer get better."""

    patience: int | None = Field(
        None, ge=1, description="End after this many evaluations in a row without a better one (default: never)."
    )
    metric: str = Field(
        "held_out_loss", description="The metric to watch: held_out_loss, or another one that evaluations record."
    )
    min_delta: float = Field(
        0.0, ge=0, description="How much better than the best earlier value a value must be to count."
    )
    best_is: Literal["auto", "lowest", "highest"] = Field(
        "auto", description="Which value of the metric is best; auto knows it for the metrics of the built-in tasks."
    )


# How a machine finds and loads its data, which may differ from one to the next.
_OF_A_MACHINE = {"folder", "path", "workers", "worker_kind", "prefetch", "memory", "disk"}
_MAY_DIFFER: Any = {
    "rendezvous": True,
    "folder": True,
    "device": True,
    "security": {"port"},
    "data": _OF_A_MACHINE,
    "model": {"weights": {"base_url"}},
    "telemetry": {"mlflow"},
}


class Job(Spec):
    """A training job."""

    name: Annotated[PlainName, Field(max_length=63)] = Field(
        "job", description="Names the run; letters, digits, dots, dashes and underscores."
    )
    folder: str | None = Field(None, description="Where records and checkpoints go (default: runs/NAME).")
    seed: int = Field(0, ge=0, lt=1 << 63, description="Seed of initial parameters, order of samples, and dropout.")
    epochs: int = Field(8, ge=1, description="Passes over the training data.")
    steps: int | None = Field(
        None,
        ge=1,
        description="Parameter updates to train for; if given, `epochs` does not count (default: by epochs).",
    )
    batch_size: int = Field(64, ge=1, description="Samples per parameter update, over all ranks together.")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Label smoothing of the cross-entropy loss.")
    device: Annotated[
        str, Rule("is not one of auto, cpu, cuda, cuda:N (such as cuda:1 for the second GPU) and mps")
    ] = Field(
        "auto",
        pattern=r"^(auto|cpu|mps|cuda(:\d{1,3})?)$",
        description="What a rank computes on: `cpu`, `cuda` (NVIDIA's GPUs, or `cuda:1` for the second one), `mps` "
        "(Apple's), or `auto`: an NVIDIA GPU for each rank while there are usable ones left, otherwise the processor. "
        "Ranks may differ: HORIZONML_DEVICE overrides this field on a machine.",
    )
    task: TaskSpec = Field(default_factory=TaskSpec)
    model: ModelSpec = Field(default_factory=ModelSpec)
    data: DataSpec = Field(default_factory=DataSpec)
    optimizer: Annotated[Sgd | Adam, Field(discriminator="name")] = Field(default_factory=Sgd)
    lr_schedule: LrSchedule = Field(default_factory=LrSchedule)
    ema: Ema = Field(default_factory=Ema)
    precision: Literal["fp32", "bf16", "auto"] = Field(
        "fp32",
        description="Precision of matrix products and convolutions. With bf16, each device computes in 16 bits the "
        "layers that this makes faster; parameters and sums of gradients stay float32. With auto, it does so only if "
        "a trial on a warm-up shows that the accuracy on held-out data does not suffer; runs of less than about 2,130 "
        "steps are too short for one.",
    )
    memory_format: Literal["auto", "contiguous", "channels_last"] = Field(
        "auto",
        description="How images lie in memory between layers; with auto, each device measures which way is faster. "
        "Results are the same except for rounding.",
    )
    evaluate: EvaluateSpec = Field(default_factory=EvaluateSpec)
    early_stop: EarlyStopSpec = Field(default_factory=EarlyStopSpec)
    parallel: Parallel = Field(default_factory=Parallel)
    rendezvous: RendezvousSpec = Field(default_factory=RendezvousSpec)
    security: SecuritySpec = Field(default_factory=SecuritySpec)
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    recovery: RecoverySpec = Field(default_factory=RecoverySpec)
    telemetry: TelemetrySpec = Field(default_factory=TelemetrySpec)

    @model_validator(mode="before")
    @classmethod
    def _default_optimizer(cls, values: Any) -> Any:
        """Take an optimizer without a name for SGD, so that `optimizer: {lr: 0.1}` is enough."""
        if isinstance(values, dict) and isinstance(values.get("optimizer"), dict):
            return {**values, "optimizer": {"name": "sgd", **values["optimizer"]}}
        return values

    @model_validator(mode="before")
    @classmethod
    def _short_task(cls, values: Any) -> Any:
        """Take `task: regression` for `task: {name: regression}`."""
        if isinstance(values, dict) and isinstance(values.get("task"), str):
            return {**values, "task": {"name": values["task"]}}
        return values

    @model_validator(mode="after")
    def _batch_fits(self) -> Job:
        micro = self.parallel.micro_batches
        if micro is not None and micro > self.batch_size:
            raise ValueError(f"parallel.micro_batches: {micro} is more than batch_size ({self.batch_size}); lower it")
        if self.data.samples is not None and self.data.samples < self.batch_size:
            raise ValueError(f"batch_size: {self.batch_size} is more than data.samples ({self.data.samples}); lower it")
        return self

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the number of steps of the whole run, unless it ends early."""
        return self.steps if self.steps is not None else self.epochs * steps_per_epoch

    def total_epochs(self, steps_per_epoch: int) -> int:
        """Return the number of epochs of the whole run; the last one may be a part of an epoch."""
        return -(-self.total_steps(steps_per_epoch) // steps_per_epoch)

    @property
    def run_folder(self) -> Path:
        """Return the folder of this run's records and checkpoints."""
        return Path(self.folder or f"runs/{self.name}")

    def digest(self) -> str:
        """Return what identifies the training, on which all ranks of a group must agree.

        Where the ranks meet, and where each keeps its files, may differ from machine to machine.
        """
        content = self.model_dump(exclude=_MAY_DIFFER)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
