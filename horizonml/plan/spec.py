"""Defines the part of a job that says how the work is spread over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from horizonml.plan.schedules import SCHEDULES
from horizonml.spec.base import Spec
from horizonml.text import count

MOST_WORKERS = 10_000
Strategy = Literal["single", "ddp", "pipeline", "hybrid", "auto", "tensor", "horovod"]
if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[("auto", *SCHEDULES)]


class StageSpec(Spec):
    """Configures one stage of an explicit plan."""

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
        """Return how the members agree on gradients, or None if the stage leaves it open."""
        return "channels" if self.split == "channels" else self.sync


class Parallel(Spec):
    """Configures how the work is spread over the ranks."""

    strategy: Strategy = Field(
        "single",
        description="Which kind of plan to make, if `stages` does not give one: `ddp` splits the batch, `pipeline` the "
        "layers, `hybrid` both; `auto` measures the devices and the links between them, and takes what is predicted to "
        "be fastest; `tensor` splits the channels within layers; `horovod` is ddp whose gradients Horovod sums.",
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=MOST_WORKERS,
        description="World size. Default: what the environment says, else 5 (1 for `single`).",
    )
    min_workers: int | None = Field(
        None,
        ge=1,
        le=MOST_WORKERS,
        description="Ranks with which training begins if no others come for 10 seconds, and without which it does not "
        "go on when some are lost. Default: it begins with all `workers`, and goes on with 1 (3 for `hybrid`).",
    )
    max_workers: int | None = Field(
        None,
        ge=1,
        le=MOST_WORKERS,
        description="Ranks that may take part when further ones join (`horizonml train --join`). Default: `workers`.",
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
        """Return the kind of the strategy, or of the explicit plan that overrides it."""
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

    @model_validator(mode="after")
    def _bounds_fit(self) -> Parallel:
        least, most, workers = self.min_workers, self.max_workers, self.workers
        for name, value in (("min_workers", least), ("max_workers", most)):
            if value is None:
                continue
            if self.stages is not None and value != self.world_size():
                ranks = count(self.world_size(), "rank")
                raise ValueError(f"{name}: {value}, but stages is a plan for exactly {ranks}; leave {name} out")
            if self.stages is None and self.strategy == "single" and value > 1:
                raise ValueError(f"{name}: strategy single trains on 1 rank, not {value}; choose ddp or leave it out")
            if self.stages is None and self.strategy == "hybrid" and value < 3:
                raise ValueError(f"{name}: strategy hybrid needs at least 3 ranks, not {value}; set it to 3 or more")
        if least is not None and workers is not None and least > workers:
            raise ValueError(f"min_workers: {least} is more than workers, {workers}; set it to {workers} or less")
        if most is not None and workers is not None and most < workers:
            raise ValueError(f"max_workers: {most} is less than workers, {workers}; set it to {workers} or more")
        if least is not None and most is not None and least > most:
            raise ValueError(f"min_workers: {least} is more than max_workers, {most}; make it {most} or less")
        return self

    def min_world_size(self) -> int:
        """Return the least number of ranks with which the job can go on when others are lost."""
        if self.stages is not None:
            return self.world_size()
        return self.min_workers or (3 if self.strategy == "hybrid" else 1)

    def world_size(self) -> int:
        """Return the number of ranks that this job asks for when the environment does not set it."""
        if self.stages is not None:
            return len({rank for stage in self.stages for rank in stage.ranks})
        if self.workers is not None:
            return self.workers
        usual = 1 if self.strategy == "single" else 5
        return min(max(usual, self.min_workers or 1), self.max_workers or MOST_WORKERS)
