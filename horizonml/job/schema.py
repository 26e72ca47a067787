"""A job: what to train, on what data, and how the work is spread over the ranks.

This is the schema of the job file; `jobfile` reads one. Every field is documented here, and this text is what
`horizonml schema` hands to editors.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from horizonml.plan.schedules import SCHEDULES
from horizonml.text import count, nearest

TORCHVISION_MODELS = (
    "resnet18",
    "resnet50",
    "mobilenet_v3_small",
    "vgg11_bn",
    "efficientnet_b0",
    "densenet121",
    "convnext_tiny",
    "vit_b_16",
)
MODELS = ("digits_cnn", *TORCHVISION_MODELS)

Strategy = Literal["single", "ddp", "pipeline", "hybrid", "auto", "tensor", "horovod"]
if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[("auto", *SCHEDULES)]
DatasetName = Literal["digits", "cifar10", "svhn", "mnist", "folder", "synthetic"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)


class ModelSpec(_Section):
    """The neural network."""

    name: str = Field(
        "digits_cnn",
        description=f"One of {', '.join(MODELS)}; or `module:callable`, a subclass of torch.nn.Module or a function "
        "that returns one (and says so: `def build() -> torch.nn.Module`). A job file that names `module:callable` is "
        "code, because that module is imported and called: run such job files only if you trust them.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for the model's constructor.")

    @model_validator(mode="after")
    def _known(self) -> ModelSpec:
        if self.name not in MODELS and not re.fullmatch(r"[\w.]+:[\w.]+", self.name):
            raise ValueError(f"name: {self.name!r} is not a known model{nearest(self.name, MODELS)}")
        return self


class DataSpec(_Section):
    """The images and labels."""

    name: DatasetName = Field(
        "digits",
        description="digits is embedded; cifar10, svhn and mnist are downloaded once per machine; folder reads "
        "one directory of images per class; synthetic makes noise of any shape, to measure speed.",
    )
    folder: str | None = Field(None, description="Where the data lies (required for `folder`), or is downloaded to.")
    download: bool = Field(True, description="Whether missing data may be downloaded.")
    samples: int | None = Field(None, ge=1, description="Train on this many samples only (default: all).")
    holdout: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="Share of the samples held out for evaluation, where the data set has no test split of its own.",
    )
    image_size: int | None = Field(None, ge=1, description="Resize images to this many pixels square.")
    channels: Literal[1, 3] | None = Field(
        None,
        description="Repeat one colour channel into three, or average three into one (default: as needed).",
    )
    classes: int = Field(10, ge=2, description="Number of classes (`synthetic` only).")
    augment: bool = Field(
        False,
        description="Shift training images by up to an eighth of their size, and mirror them where that keeps "
        "the class (cifar10, folder, synthetic).",
    )

    @model_validator(mode="after")
    def _folder_given(self) -> DataSpec:
        if self.name == "folder" and self.folder is None:
            raise ValueError("folder: name the directory that holds one folder of images per class")
        return self


class Sgd(_Section):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"] = "sgd"
    lr: float = Field(0.05, gt=0, description="Peak learning rate.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum.")
    nesterov: bool = Field(False, description="Use Nesterov momentum.")
    weight_decay: float = Field(5e-4, ge=0, description="L2 penalty.")

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Sgd:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov: true needs momentum above 0")
        return self


class Adam(_Section):
    """Adam (L2 penalty) or AdamW (decoupled weight decay)."""

    name: Literal["adam", "adamw"]
    lr: float = Field(1e-3, gt=0, description="Peak learning rate.")
    betas: Annotated[list[float], Field(min_length=2, max_length=2)] = Field(
        [0.9, 0.999], description="Decay rates of the two moments, each in [0, 1)."
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay.")

    @model_validator(mode="after")
    def _betas_in_range(self) -> Adam:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: {self.betas} must both lie in [0, 1)")
        return self


class LrSchedule(_Section):
    """How the learning rate changes over the run."""

    name: Literal["constant", "cosine", "linear", "step"] = Field(
        "cosine", description="Shape of the decay after the warm-up."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps over which the rate rises linearly to its peak.")
    final: float = Field(0.0, ge=0, le=1, description="Share of the peak at the end (cosine, linear).")
    every_epochs: int = Field(30, ge=1, description="Epochs between two drops (step).")
    factor: float = Field(0.1, gt=0, le=1, description="Factor of each drop (step).")


class StageSpec(_Section):
    """One stage of an explicit plan."""

    ranks: Annotated[list[int], Field(min_length=1)] = Field(description="The ranks that are members of the stage.")
    shares: list[float] | None = Field(
        None, description="Share of every micro-batch for each member, in any unit (default: equal)."
    )
    split: Literal["samples", "channels"] = Field(
        "samples",
        description="What the shares are of: of the samples, each member holding all layers of the stage; or of the "
        "channels within layers, as strategy `tensor` splits them (in a plan of one stage).",
    )
    sync: Literal["all-reduce", "fp16", "powersgd", "channels", "horovod", "horovod-fp16"] | None = Field(
        None,
        description="How the members agree on gradients: by sums of 32-bit floats, of 16-bit floats or of PowerSGD's "
        "thin matrices; by splitting channels; or by Horovod's sums, of 32-bit or 16-bit floats (default: what `split` "
        "and `gradient_compression` say).",
    )
    send: Literal["fp32", "bf16", "int8"] | None = Field(
        None, description="Format of what goes to the next stage and comes back (default: `activations`)."
    )
    layers: Annotated[list[int], Field(min_length=2, max_length=2)] | None = Field(
        None,
        description="First and last layer of the stage (`horizonml plan` lists the layers). Name them for all "
        "stages or for none; with none, a measured profile places the cuts.",
    )

    @model_validator(mode="after")
    def _shares_fit(self) -> StageSpec:
        if self.shares is not None:
            if len(self.shares) != len(self.ranks):
                shares, ranks = count(len(self.shares), "share"), count(len(self.ranks), "rank")
                raise ValueError(f"shares: {shares} for {ranks}; give one for each")
            if min(self.shares) <= 0:
                raise ValueError(f"shares: {self.shares} must all be above 0")
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"ranks: {self.ranks} names a rank twice")
        if self.split == "channels" and self.sync not in (None, "channels"):
            raise ValueError(f"sync: {self.sync} does not split channels; leave out one of split and sync")
        if self.layers is not None and not 0 <= self.layers[0] <= self.layers[1]:
            raise ValueError(f"layers: {self.layers} is not [first, last] with 0 <= first <= last")
        return self

    @property
    def how(self) -> str | None:
        """How the members agree, as far as the stage itself says."""
        return "channels" if self.split == "channels" else self.sync


class Parallel(_Section):
    """How the work is spread over the ranks."""

    strategy: Strategy = Field(
        "single",
        description="Which kind of plan to make, if `stages` does not give one: `ddp` splits the batch, `pipeline` the "
        "layers, `hybrid` both; `auto` measures the devices and the links between them, and takes what is predicted to "
        "be fastest; `tensor` splits the channels within layers; `horovod` is ddp whose gradients Horovod sums.",
    )
    workers: int | None = Field(
        None, ge=1, le=10_000, description="World size. Default: what the environment says, else 5 (1 for `single`)."
    )
    schedule: ScheduleName = Field(
        "auto",
        description="Order of forward and backward passes in a pipeline. `auto` is 1f1b, except where a measured "
        "profile predicts that another one saves time.",
    )
    micro_batches: int | None = Field(
        None, ge=1, description="Micro-batches per batch. Default: from a measured profile of the layers."
    )
    threads: int | None = Field(
        None, ge=1, description="Threads per rank. Default: the machine's cores, divided by its ranks."
    )
    activations: Literal["auto", "fp32", "bf16", "int8"] = Field(
        "auto",
        description="What travels between stages, forward and back: 32-bit floats, 16-bit ones, or 8-bit integers with "
        "a scale for each channel or sample. `auto` is fp32, except where strategy auto finds that a link is slow.",
    )
    gradient_compression: Literal["none", "fp16", "powersgd"] = Field(
        "none",
        description="Within stages send gradients as they are, as 16-bit floats, or as products of thin matrices "
        "(PowerSGD of rank 4, after ten whole steps). Both cost precision.",
    )
    replan: bool = Field(
        False,
        description="Where a device turns out slower or faster than planned, make a new plan, and move the layers that "
        "change hands (strategy `auto`).",
    )
    replan_threshold: float = Field(
        1.5,
        gt=1,
        description="A rank whose computing takes so many times as long as planned, compared with the others, is a "
        "straggler.",
    )
    stages: Annotated[list[StageSpec], Field(min_length=1)] | None = Field(
        None, description="An explicit plan; it overrides `strategy`."
    )

    @model_validator(mode="after")
    def _fits_the_strategy(self) -> Parallel:
        strategy = self._kind()
        unable = {"fp16": ("single", "pipeline", "tensor"), "powersgd": ("single", "pipeline", "tensor", "horovod")}
        if strategy in unable.get(self.gradient_compression, ()):
            raise ValueError(
                f"gradient_compression: strategy {strategy} cannot use {self.gradient_compression}; set it to none"
            )
        if self.activations != "auto" and strategy in ("single", "ddp", "tensor", "horovod"):
            raise ValueError(
                f"activations: strategy {strategy} sends none between stages, so leave out {self.activations}"
            )
        if self.replan and strategy != "auto":
            raise ValueError(f"replan: only strategy auto makes new plans, not {strategy}; leave it out")
        if strategy in ("horovod", "tensor") and (self.micro_batches or 1) > 1:
            raise ValueError(f"micro_batches: strategy {strategy} has 1, not {self.micro_batches}; leave it out")
        return self

    def _kind(self) -> str:
        """Return what the strategy, or the explicit plan that overrides it, amounts to."""
        if self.stages is None:
            return self.strategy
        kinds = {"channels": "tensor", "horovod": "horovod", "horovod-fp16": "horovod"}
        return next((kinds[stage.how] for stage in self.stages if stage.how in kinds), "explicit stages")

    @model_validator(mode="after")
    def _stages_fit(self) -> Parallel:
        if self.stages is None:
            if self.strategy == "single" and (self.workers or 1) > 1:
                raise ValueError(
                    f"workers: strategy single trains on 1 rank, not {self.workers}; "
                    "choose parallel.strategy ddp, pipeline or hybrid, or 1 worker (--workers 1)"
                )
            if self.strategy == "hybrid" and self.workers is not None and self.workers < 3:
                raise ValueError("workers: strategy hybrid needs at least 3 ranks; use ddp or pipeline for 2")
            return self
        ranks = sorted({rank for stage in self.stages for rank in stage.ranks})
        if ranks != list(range(len(ranks))):
            raise ValueError(f"stages: ranks {ranks} must be 0 to {len(ranks) - 1}, without gaps")
        if self.workers is not None and self.workers != len(ranks):
            raise ValueError(f"workers: {self.workers}, but stages names {count(len(ranks), 'rank')}; make them agree")
        if len(self.stages) > 1 and self._kind() != "explicit stages":
            does = "split channels" if self._kind() == "tensor" else "sum gradients by Horovod"
            raise ValueError(f"stages: only a plan of one stage can {does}; this one has {len(self.stages)}")
        given = [stage.layers for stage in self.stages]
        if any(given) and not all(given):
            raise ValueError("stages: name the layers of all stages, or of none")
        if all(given):
            expected = 0
            for number, layers in enumerate(given):
                assert layers is not None
                if layers[0] != expected:
                    raise ValueError(
                        f"stages: stage {number} starts at layer {layers[0]}, but layer {expected} comes next"
                    )
                expected = layers[1] + 1
        return self

    def fewest(self) -> int:
        """With how many ranks at least the job can go on when others are lost."""
        if self.stages is not None:
            return self.world_size()
        return 3 if self.strategy == "hybrid" else 1

    def world_size(self) -> int:
        """The number of ranks this job asks for when the environment does not say."""
        if self.stages is not None:
            return len({rank for stage in self.stages for rank in stage.ranks})
        return self.workers or (1 if self.strategy == "single" else 5)


class RendezvousSpec(_Section):
    """Where and how the ranks meet."""

    address: str | None = Field(
        None,
        pattern=r"^\[?[\w.:-]+\]?:\d+$",
        description="host:port of `horizonml rendezvous`. Default: $HORIZONML_RENDEZVOUS; alone on one machine "
        "it is started for you.",
    )
    timeout: float = Field(120.0, gt=0, description="Seconds to wait for the service and for all ranks.")
    step_timeout: float = Field(
        300.0, gt=0, description="Seconds to wait for a peer within a step before it counts as lost."
    )
    replace_timeout: float = Field(
        30.0,
        ge=0,
        description="Seconds that the others wait for the replacement of a lost rank; then they go on without it, "
        "until it comes (0: never without it).",
    )
    max_attempts: int = Field(
        5,
        ge=0,
        description="How often in a row ranks meet again after losing one, without finishing a step in between, "
        "before they give up (0: the first lost rank ends the job).",
    )


class CheckpointSpec(_Section):
    """When the state of the training is saved."""

    every_steps: int | None = Field(None, ge=1, description="Steps between two checkpoints (default: once per epoch).")
    keep: int = Field(2, ge=1, description="How many checkpoints to keep.")
    resume: bool = Field(True, description="Go on from the newest intact checkpoint in the run's folder.")
    enabled: bool = Field(True, description="Whether to save checkpoints at all.")


class TelemetrySpec(_Section):
    """What is recorded while training."""

    divergence_every: int = Field(
        20, ge=0, description="Steps between two measurements of gradient divergence (0: never)."
    )
    timeline_every: int = Field(50, ge=0, description="Steps between two recorded timelines of a step (0: never).")


class Job(_Section):
    """A training job."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=63)] = Field(
        "job", description="Names the run; letters, digits, dots, dashes and underscores."
    )
    folder: str | None = Field(None, description="Where records and checkpoints go (default: runs/NAME).")
    seed: int = Field(0, ge=0, description="Seed of initial parameters, order of samples, and dropout.")
    epochs: int = Field(8, ge=1, description="Passes over the training data.")
    batch_size: int = Field(64, ge=1, description="Samples per parameter update, over all ranks together.")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Label smoothing of the cross-entropy loss.")
    model: ModelSpec = Field(default_factory=ModelSpec)
    data: DataSpec = Field(default_factory=DataSpec)
    optimizer: Annotated[Sgd | Adam, Field(discriminator="name")] = Field(default_factory=Sgd)
    lr_schedule: LrSchedule = Field(default_factory=LrSchedule)
    parallel: Parallel = Field(default_factory=Parallel)
    rendezvous: RendezvousSpec = Field(default_factory=RendezvousSpec)
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    telemetry: TelemetrySpec = Field(default_factory=TelemetrySpec)

    @model_validator(mode="before")
    @classmethod
    def _default_optimizer(cls, values: Any) -> Any:
        """`optimizer: {lr: 0.1}` means SGD."""
        if isinstance(values, dict) and isinstance(values.get("optimizer"), dict):
            return {**values, "optimizer": {"name": "sgd", **values["optimizer"]}}
        return values

    @model_validator(mode="after")
    def _batch_fits(self) -> Job:
        micro = self.parallel.micro_batches
        if micro is not None and micro > self.batch_size:
            raise ValueError(f"parallel.micro_batches: {micro} is more than batch_size ({self.batch_size}); lower it")
        if self.data.samples is not None and self.data.samples < self.batch_size:
            raise ValueError(f"batch_size: {self.batch_size} is more than data.samples ({self.data.samples}); lower it")
        return self

    @property
    def run_folder(self) -> Path:
        """Where this run's records and checkpoints go."""
        return Path(self.folder or f"runs/{self.name}")

    def digest(self) -> str:
        """Identifies what is trained and how; all ranks of a group must agree on it.

        Where the ranks meet and where each keeps its files may differ from machine to machine.
        """
        content = self.model_dump(exclude={"rendezvous": True, "folder": True, "data": {"folder"}})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
