"""Turns a job into a problem for the planner: what its `parallel` section asks for, and what it leaves open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from horizonml.job.schema import Job
from horizonml.plan.plan import Plan, Stage, facts_of
from horizonml.plan.schedules import SCHEDULES
from horizonml.plan.spec import Parallel, StageSpec
from horizonml.plan.syncs import FORMATS, Sync, compressed, offered
from horizonml.planner.problem import (
    MICRO_BATCHES,
    NO_LOADING,
    Constraints,
    FixedStage,
    Loading,
    Objective,
    Problem,
    Watts,
)
from horizonml.planner.profile import Host, Network, Profile

_EVERY = (4, 8, 16, 32, 64)  # steps after which members may synchronise
_DEFAULT_SCHEDULE = "1f1b"


def constraints_of(parallel: Parallel, world_size: int | None = None) -> Constraints:
    """Return the constraints that a job puts on its plan for `world_size` ranks (by default as many as it asks for)."""
    if parallel.stages is None and parallel.replicas is not None:
        ranks = world_size or parallel.world_size()
        strategy = Constraints(ordered=True, one_profile=True, stages=_replicas(ranks, parallel))
    elif parallel.stages is None:
        facts = facts_of(parallel.strategy)
        strategy = Constraints(
            least_stages=facts.least_stages,
            most_stages=facts.most_stages,
            most_members=facts.most_members,
            replicated=facts.least_stages > 1,
            ordered=not facts.is_free,
            one_profile=not facts.is_free,
            sync=facts.sync,
        )
    else:
        stages = tuple(_fixed(spec, parallel) for spec in parallel.stages)
        strategy = Constraints(one_profile=True, stages=stages)
    if parallel.sync is not None:
        strategy = replace(strategy, local=parallel.sync.local())
        if strategy.stages is None and not parallel.is_free:  # whose replicas the planner forms
            strategy = replace(strategy, sync=Sync.LOCAL)
    others = (name for name in SCHEDULES if name != _DEFAULT_SCHEDULE)
    if parallel.is_free and not parallel.is_exact:
        strategy = replace(strategy, formats=tuple(FORMATS))
        if parallel.gradient_compression == "none":
            strategy = replace(strategy, syncs=offered(), every=_EVERY)
    return replace(
        strategy,
        micro_batches=(parallel.micro_batches,) if parallel.micro_batches else MICRO_BATCHES,
        formats=strategy.formats if parallel.activations == "auto" else (parallel.activations,),
        schedules=(_DEFAULT_SCHEDULE, *others) if parallel.schedule == "auto" else (parallel.schedule,),
        sync=compressed(strategy.sync, parallel.gradient_compression) or strategy.sync,
    )


def _replicas(ranks: int, parallel: Parallel) -> tuple[FixedStage, ...]:
    """Return the stages of replicas of a pipeline, each on consecutive ranks.

    There are as many replicas as the job asks for, or fewer, if so many ranks do not form as many of equal length.
    """
    assert parallel.replicas is not None
    replicas = next(number for number in range(min(parallel.replicas, ranks), 0, -1) if ranks % number == 0)
    each = ranks // replicas
    send = "fp32" if parallel.activations == "auto" else parallel.activations
    return tuple(
        FixedStage(
            tuple(range(stage, ranks, each)),
            (1.0,) * replicas,
            Sync.LOCAL if replicas > 1 else Sync.ALL_REDUCE,
            send,
        )
        for stage in range(each)
    )


def _fixed(spec: StageSpec, parallel: Parallel) -> FixedStage:
    """Return what a job says about a stage; what the stage leaves out comes from the whole section."""
    if parallel.sync is not None:
        sync: Sync | None = Sync.LOCAL
    else:
        sync = Sync.named(spec.how) if spec.how else compressed(Sync.ALL_REDUCE, parallel.gradient_compression)
    return FixedStage(
        tuple(spec.ranks),
        tuple(spec.shares or [1.0] * len(spec.ranks)),
        sync if sync is not None and len(spec.ranks) > 1 else Sync.ALL_REDUCE,
        spec.send or ("fp32" if parallel.activations == "auto" else parallel.activations),
        (spec.layers[0], spec.layers[1] + 1) if spec.layers is not None else None,
    )


def syncs_of(parallel: Parallel) -> set[Sync]:
    """Return the ways in which members of the stages of a job's plan may agree on gradients."""
    constraints = constraints_of(parallel)
    if constraints.stages is not None:
        return {stage.sync for stage in constraints.stages}
    return {constraints.sync, *constraints.syncs}


def may_cut(parallel: Parallel, ranks: int) -> bool:
    """Return whether a job's plan for some ranks may give a rank less than the whole model."""
    constraints = constraints_of(parallel, ranks)
    if any(sync.splits_channels for sync in syncs_of(parallel)):
        return ranks > 1
    if constraints.stages is not None:
        return len(constraints.stages) > 1
    return constraints.most_stages != 1 and ranks > 1


def needs_profile(parallel: Parallel, world_size: int) -> bool:
    """Return whether the plan depends on measurements."""
    constraints = constraints_of(parallel, world_size)
    if constraints.stages is not None:
        several = len(constraints.stages) > 1
        return constraints.cuts is None or (several and len(constraints.micro_batches) > 1)
    return constraints.most_stages != 1 and world_size > 1


def measures_every_device(parallel: Parallel) -> bool:
    """Return whether the plan uses measurements of every device; otherwise rank 0's profile stands for all."""
    return not constraints_of(parallel).one_profile


def fixed_plan(job: Job, layers: int, world_size: int) -> Plan:
    """Return the plan of a job that needs no profile. Raises PlanError."""
    constraints = constraints_of(job.parallel, world_size)
    schedule, micro_batches = constraints.schedules[0], constraints.micro_batches[0]
    if constraints.stages is None:
        sync = constraints.sync if world_size > 1 else Sync.ALL_REDUCE
        stages: tuple[Stage, ...] = (Stage(0, layers, tuple(range(world_size)), (1.0,) * world_size, sync),)
    else:
        stages = tuple(
            Stage(*(fixed.layers or (0, layers)), fixed.ranks, fixed.shares, fixed.sync, fixed.send)
            for fixed in constraints.stages
        )
    plan = with_local_steps(Plan(stages, schedule, micro_batches), job.parallel)
    plan.check(layers, world_size)
    return plan


def problem_for(
    job: Job,
    profiles: Sequence[Profile],
    hosts: Sequence[Host],
    network: Network,
    optimizer_copies: int,
    last_batch: int = 0,
    synced_bytes: Mapping[str, Sequence[int]] = MappingProxyType({}),
    loading: Loading = NO_LOADING,
    watts: Sequence[Watts | None] = (),
    steps: int = 0,
) -> Problem:
    """Return what a job leaves open to the search, with a profile for every rank; see `Problem` for the rest."""
    return Problem(
        profiles,
        hosts,
        network,
        job.batch_size,
        optimizer_copies,
        last_batch,
        synced_bytes,
        constraints_of(job.parallel, len(profiles)),
        loading,
        watts,
        Objective(job.parallel.objective, job.parallel.slowdown, job.parallel.deadline_seconds, steps),
    )


def with_local_steps(plan: Plan, parallel: Parallel) -> Plan:
    """Return a plan with what the job says of local steps, if any of its stages takes them."""
    if parallel.sync is None or all(not stage.sync.steps_alone for stage in plan.stages):
        return plan
    return replace(plan, local=parallel.sync.local())
