"""Defines the part of a job that says how the work is spread over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from horizonml.errors import JobError
from horizonml.plan.local import LOCAL_FORMATS, MOST_LOCAL_STEPS, Local
from horizonml.plan.plan import EXPLICIT, STRATEGIES, facts_of
from horizonml.plan.schedules import SCHEDULES
from horizonml.plan.syncs import FORMATS, SYNCS
from horizonml.spec.base import Spec, duration
from horizonml.text import count

MOST_WORKERS = 10_000
if TYPE_CHECKING:
    Strategy = str
    ScheduleName = str
    SyncName = str
    FormatName = str
    LinkFormat = str
    Compression = str
    LocalFormat = str
else:
    _SYNCS = [sync for sync in SYNCS.values() if not sync.steps_alone]
    Strategy = Literal[tuple(STRATEGIES)]
    ScheduleName = Literal[("auto", *SCHEDULES)]
    SyncName = Literal[tuple(sync.name for sync in _SYNCS)]
    FormatName, LinkFormat = Literal[tuple(FORMATS)], Literal[("auto", *FORMATS)]
    Compression = Literal[("none", *dict.fromkeys(sync.compression for sync in _SYNCS if sync.compression))]
    LocalFormat = Literal[LOCAL_FORMATS]
_WAYS = "; ".join(
    f"`{sync.name}` sums {sync.what}{'' if sync.exact else ', which is not exact'}"
    for sync in SYNCS.values()
    if not sync.steps_alone
)


class StageSpec(Spec):
    """Configures one stage of an explicit plan."""

    ranks: Annotated[list[int], Field(min_length=1)] = Field(description="The ranks that are members of the stage.")
    shares: list[float] | None = Field(
        None,
        description="Share of every micro-batch for each member, in any unit (default: equal). With local steps, "
        "members have their shares of batches on average, which need not be whole numbers of samples.",
    )
    split: Literal["samples", "channels"] = Field(
        "samples",
        description="What the shares are of: of the samples, each member holding all layers of the stage; or of the "
        "channels within layers, as strategy `tensor` splits them (in a plan of one stage).",
    )
    sync: SyncName | None = Field(
        None,
        description="How the members agree on gradients (default: what `split` and `gradient_compression` say): "
        f"{_WAYS}.",
    )
    send: FormatName | None = Field(
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


class SyncSpec(Spec):
    """Configures local steps: ranks, or replicas of a pipeline, train independently between synchronisations."""

    every: int = Field(
        ge=1,
        le=MOST_LOCAL_STEPS,
        description="Steps from one synchronisation to the next, during which nothing travels between replicas.",
    )
    fragments: int = Field(
        1,
        ge=1,
        description="Groups of layers that are synchronised in turn, one every `every / fragments` steps, which "
        "spreads what travels over time.",
    )
    delay: int = Field(
        0,
        ge=0,
        description="Steps by which the update of a synchronisation is applied late, while training goes on.",
    )
    late: int = Field(
        0,
        ge=0,
        description="Further steps for which replicas go on while another one is late with its part of a "
        "synchronisation. Then how long devices take decides on results, which are no longer the same in each run.",
    )
    format: LocalFormat = Field(
        "fp32",
        description="What travels: the changes of all parameters as 32-bit floats or in 4 bits, or only the largest of "
        "them. What is left out travels with later synchronisations.",
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        description="Learning rate of the outer optimizer (default: 1, which with a momentum of 0 is the plain mean of "
        "all replicas; 0.7 with a momentum that the job names).",
    )
    momentum: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Nesterov momentum of the outer optimizer. The default is 0 with SGD and the format `topk`, and "
        "1 - 1 / sqrt(replicas) with Adam and AdamW. DiLoCo's 0.9 needs many synchronisations.",
    )

    @model_validator(mode="after")
    def _fits(self) -> SyncSpec:
        problem = self.local().problem()
        if problem is not None:
            raise ValueError(problem)
        return self

    def local(self) -> Local:
        """Return what this says of a plan."""
        return Local(self.every, self.fragments, self.delay, self.format, self.learning_rate, self.momentum, self.late)


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
        description="World size. Default: what the environment says, else 5. On one machine, the default is 1 for "
        "`single`, `ddp` and `auto`, because one process uses all of its cores (or one for each CUDA device).",
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
    exact: bool | None = Field(
        None,
        description="Plans of strategy `auto` are exact by default: 32-bit floats travel, and members synchronise in "
        "every step. With true, the job may name nothing that is not exact, with any strategy. With false, the planner "
        "may also choose fewer bits, compressed sums and local steps where a link is slow. It says what it has chosen "
        "and what that saves, and the run first tries formats on a warm-up, as far as it can.",
    )
    activations: LinkFormat = Field(
        "auto",
        description="What travels between stages, forward and back: 32-bit floats, 16-bit ones, 8-bit integers with a "
        "scale for each channel or sample, or 4-bit ones with a scale for every 64 values. `auto` is fp32, unless "
        "`exact` is false and strategy `auto` finds that a link is slow.",
    )
    gradient_compression: Compression = Field(
        "none",
        description="Within stages, send gradients as they are, as 16-bit floats, as products of thin matrices "
        "(PowerSGD of rank 4, after ten whole steps), or as 4-bit numbers with a scale for every 64 values and error "
        "feedback. All but the first cost precision.",
    )
    sync: SyncSpec | None = Field(
        None,
        description="Local steps: the ranks of `ddp`, or the replicas of a pipeline, train independently, and "
        "synchronise their parameters every so many steps (default: they sum gradients in every step). This is not "
        "exact.",
    )
    replicas: int | None = Field(
        None,
        ge=2,
        description="With `sync` and strategy pipeline: how many replicas of the pipeline the ranks form, each with "
        "the same number of ranks.",
    )
    objective: Literal["time", "energy", "deadline"] = Field(
        "time",
        description="What strategy `auto` plans for: the fastest step; the least energy, within `slowdown`; or the "
        "least energy with which the run ends within `deadline`. Energy needs the watts of every device, which some "
        "devices measure; state the others.",
    )
    slowdown: float = Field(
        2.0,
        ge=1,
        description="With `objective: energy`, how many times as long as the fastest plan's a step may take.",
    )
    deadline: str | None = Field(
        None,
        description="With `objective: deadline`, the time that the run may take, such as `2h` or `1h30m`. Nine tenths "
        "of it are for steps, the rest for evaluations, checkpoints and the start.",
    )
    replan: bool | None = Field(
        None,
        description="If a device turns out slower or faster than planned, make a new plan, and move the layers that "
        "change hands. Default: true with strategy `auto`, which alone can do it.",
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
        facts = facts_of(strategy)
        if self.gradient_compression not in ("none", *facts.compressions):
            raise ValueError(
                f"gradient_compression: strategy {strategy} cannot use {self.gradient_compression}; set it to none"
            )
        if self.activations != "auto" and not facts.sends:
            raise ValueError(
                f"activations: strategy {strategy} sends none between stages, so leave out {self.activations}"
            )
        if self.replan and not facts.is_free:
            raise ValueError(f"replan: only strategy auto makes new plans, not {strategy}; leave it out")
        if not facts.micro_batches and (self.micro_batches or 1) > 1:
            raise ValueError(f"micro_batches: strategy {strategy} has 1, not {self.micro_batches}; leave it out")
        return self

    @model_validator(mode="after")
    def _sync_fits(self) -> Parallel:
        if self.replicas is not None:
            if self.sync is None or self.stages is not None or self.strategy != "pipeline":
                raise ValueError(
                    "replicas: only strategy pipeline with parallel.sync makes replicas; leave it out, or add both"
                )
            if self.workers is not None and (self.workers % self.replicas or self.workers < 2 * self.replicas):
                raise ValueError(
                    f"replicas: {self.workers} workers do not form {self.replicas} replicas of 2 or more ranks each; "
                    f"use {2 * self.replicas} or another multiple of {self.replicas}"
                )
        if self.sync is None:
            return self
        strategy = self._kind()
        if not facts_of(strategy).local_steps and self.replicas is None:
            hint = (
                "add parallel.replicas"
                if strategy == "pipeline"
                else "choose auto, ddp, or pipeline with parallel.replicas"
            )
            raise ValueError(f"sync: strategy {strategy} takes no local steps; {hint}, or leave sync out")
        if self.gradient_compression != "none":
            raise ValueError(
                f"gradient_compression: with local steps no gradients are summed, so leave out "
                f"{self.gradient_compression}; parallel.sync.format says what travels"
            )
        for number, stage in enumerate(self.stages or ()):
            first = (self.stages or [stage])[0]
            if stage.sync is not None:
                raise ValueError(
                    f"stages: stage {number} has sync {stage.sync}, but parallel.sync is given; leave out one"
                )
            if len(stage.ranks) < 2 or len(stage.ranks) != len(first.ranks):
                raise ValueError(
                    f"stages: stage {number} has {count(len(stage.ranks), 'rank')} and stage 0 has {len(first.ranks)}; "
                    "with parallel.sync each stage has one rank of each replica, and there are at least 2 replicas"
                )
            if (stage.shares or [1.0] * len(stage.ranks)) != (first.shares or [1.0] * len(first.ranks)):
                raise ValueError(
                    f"stages: stage {number} has other shares than stage 0; with parallel.sync all stages have the same"
                )
        return self

    @model_validator(mode="after")
    def _exact_fits(self) -> Parallel:
        lossy = next(self._lossy_fields(), None) if self.exact else None
        if lossy is not None:
            field, value = lossy
            raise ValueError(
                f"exact: true, but parallel.{field} ({value}) is not exact; leave out one of parallel.exact and "
                f"parallel.{field}"
            )
        return self

    def _lossy_fields(self) -> Iterator[tuple[str, str]]:
        """Yield the fields that ask for what is not exact, with their values."""
        if self.sync is not None:
            yield "sync", f"every: {self.sync.every}"
        if self.gradient_compression != "none":
            yield "gradient_compression", self.gradient_compression
        if self.activations not in ("auto", "fp32"):
            yield "activations", self.activations
        for number, stage in enumerate(self.stages or ()):
            if stage.sync is not None and not SYNCS[stage.sync].exact:
                yield f"stages[{number}].sync", stage.sync
            if stage.send not in (None, "fp32"):
                yield f"stages[{number}].send", stage.send

    @property
    def is_exact(self) -> bool:
        """Return whether the planner chooses exact plans only."""
        return self.exact is not False

    @model_validator(mode="after")
    def _objective_fits(self) -> Parallel:
        if self.objective != "time" and not self.is_free:
            kind = self._kind()
            raise ValueError(
                f"objective: only strategy auto plans for {self.objective}, not {kind}; set strategy: auto"
            )
        if self.objective == "deadline" and self.deadline is None:
            raise ValueError("deadline: objective deadline needs one, such as 2h")
        if self.objective != "deadline" and self.deadline is not None:
            raise ValueError(f"deadline: {self.deadline} is for objective deadline, not {self.objective}")
        if self.objective != "energy" and "slowdown" in self.model_fields_set and self.slowdown != 2:
            raise ValueError(f"slowdown: {self.slowdown:g} is for objective energy, not {self.objective}")
        try:
            _ = self.deadline_seconds
        except JobError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def deadline_seconds(self) -> float | None:
        """Return the seconds that the run may take, or None. Raises JobError if the deadline is no duration."""
        return duration(self.deadline, "deadline") if self.deadline is not None else None

    def _kind(self) -> str:
        """Return the kind of the strategy, or of the explicit plan that overrides it."""
        if self.stages is None:
            return self.strategy
        return next((SYNCS[s.how].strategy for s in self.stages if s.how and SYNCS[s.how].strategy), EXPLICIT)

    @property
    def is_free(self) -> bool:
        """Return whether the planner chooses the kind of plan."""
        return self.stages is None and facts_of(self.strategy).is_free

    @model_validator(mode="after")
    def _stages_fit(self) -> Parallel:
        if self.stages is None:
            facts, workers = facts_of(self.strategy), self.workers
            if workers is not None and workers > (facts.max_workers or workers):
                raise ValueError(
                    f"workers: strategy {self.strategy} trains on {count(facts.max_workers or 1, 'rank')}, not "
                    f"{workers}; choose parallel.strategy ddp, pipeline or hybrid, or 1 worker (--workers 1)"
                )
            if workers is not None and workers < facts.min_workers:
                raise ValueError(
                    f"workers: strategy {self.strategy} needs at least {facts.min_workers} ranks; use ddp or pipeline "
                    f"for {workers}"
                )
            return self
        ranks = sorted({rank for stage in self.stages for rank in stage.ranks})
        if ranks != list(range(len(ranks))):
            raise ValueError(f"stages: ranks {ranks} must be 0 to {len(ranks) - 1}, without gaps")
        if self.workers is not None and self.workers != len(ranks):
            raise ValueError(f"workers: {self.workers}, but stages names {count(len(ranks), 'rank')}; make them agree")
        for number, stage in enumerate(self.stages):
            alone = SYNCS[stage.how].alone if stage.how else ""
            if alone and len(self.stages) > 1:
                raise ValueError(
                    f"stages: stage {number} {alone}; only a plan of one stage can, and this one has {len(self.stages)}"
                )
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
        facts = facts_of(self.strategy)
        for name, value in (("min_workers", least), ("max_workers", most)):
            if value is None:
                continue
            if self.stages is not None and value != self.world_size():
                ranks = count(self.world_size(), "rank")
                raise ValueError(f"{name}: {value}, but stages is a plan for exactly {ranks}; leave {name} out")
            if self.stages is None and value > (facts.max_workers or value):
                ranks = count(facts.max_workers or 1, "rank")
                raise ValueError(
                    f"{name}: strategy {self.strategy} trains on {ranks}, not {value}; choose ddp or leave it out"
                )
            if self.stages is None and value < facts.min_workers > 1:
                raise ValueError(
                    f"{name}: strategy {self.strategy} needs at least {facts.min_workers} ranks, not {value}; set it "
                    f"to {facts.min_workers} or more"
                )
        if least is not None and workers is not None and least > workers:
            raise ValueError(f"min_workers: {least} is more than workers, {workers}; set it to {workers} or less")
        if most is not None and workers is not None and most < workers:
            raise ValueError(f"max_workers: {most} is less than workers, {workers}; set it to {workers} or more")
        if least is not None and most is not None and least > most:
            raise ValueError(f"min_workers: {least} is more than max_workers, {most}; make it {most} or less")
        return self

    @property
    def may_take_local_steps(self) -> bool:
        """Return whether members may take local steps, because the job says so or the planner may choose it."""
        return self.sync is not None or (self.is_free and not self.is_exact)

    def min_world_size(self) -> int:
        """Return the least number of ranks with which the job can go on when others are lost."""
        if self.stages is not None:
            return self.world_size()
        return self.min_workers or facts_of(self.strategy).min_workers

    def most_elastic(self) -> int:
        """Return how many ranks may take part in a run whose number of workers changes while they train."""
        if self.stages is not None:
            return self.world_size()
        return self.max_workers or facts_of(self.strategy).max_workers or 256

    @property
    def replans(self) -> bool:
        """Return whether a new plan is made where a device turns out slower or faster than planned."""
        return self.replan if self.replan is not None else self.is_free

    def world_size(self) -> int:
        """Return the number of ranks that this job asks for when the environment does not set it."""
        if self.stages is not None:
            return len({rank for stage in self.stages for rank in stage.ranks})
        if self.workers is not None:
            return self.workers
        usual = facts_of(self.strategy).max_workers or 5
        return min(max(usual, self.min_workers or 1), self.max_workers or MOST_WORKERS)
