"""Turns a job's `parallel` section into constraints on the planner's search."""

from __future__ import annotations

from dataclasses import replace

from horizonml.plan.schedules import SCHEDULES
from horizonml.plan.spec import Parallel, StageSpec
from horizonml.plan.strategies import facts_of
from horizonml.plan.syncs import FORMATS, Sync, compressed, offered
from horizonml.planner.objective import Objective
from horizonml.planner.problem import MICRO_BATCHES, Constraints, FixedStage

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


def objective_of(parallel: Parallel, steps: int) -> Objective:
    """Return what a job's plan is chosen for, in a run of so many steps."""
    return Objective(parallel.objective, parallel.slowdown, parallel.deadline_seconds, steps)


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
