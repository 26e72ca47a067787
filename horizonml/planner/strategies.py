"""Turns a job's `parallel` section into constraints on the planner's search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from horizonml.plan.plan import FORMATS, Sync
from horizonml.plan.schedules import SCHEDULES
from horizonml.plan.spec import Parallel, StageSpec
from horizonml.planner.problem import MICRO_BATCHES, Constraints, FixedStage

_ONE_STAGE = Constraints(most_stages=1, ordered=True, one_profile=True)

STRATEGIES: Mapping[str, Constraints] = {
    "single": _ONE_STAGE,
    "ddp": _ONE_STAGE,
    "pipeline": Constraints(most_members=1, ordered=True, one_profile=True),
    "hybrid": Constraints(least_stages=2, replicated=True, ordered=True, one_profile=True),
    "tensor": replace(_ONE_STAGE, sync=Sync.CHANNELS),
    "horovod": replace(_ONE_STAGE, sync=Sync.HOROVOD),
    "auto": Constraints(formats=tuple(FORMATS)),
}
_COMPRESSED = {
    (Sync.ALL_REDUCE, "fp16"): Sync.FP16,
    (Sync.ALL_REDUCE, "powersgd"): Sync.POWERSGD,
    (Sync.HOROVOD, "fp16"): Sync.HOROVOD_FP16,
}
_DEFAULT_SCHEDULE = "1f1b"


def constraints_of(parallel: Parallel) -> Constraints:
    """Return the constraints that a job puts on its plan."""
    if parallel.stages is None:
        strategy = STRATEGIES[parallel.strategy]
    else:
        stages = tuple(_fixed(spec, parallel) for spec in parallel.stages)
        strategy = Constraints(one_profile=True, stages=stages)
    others = (name for name in SCHEDULES if name != _DEFAULT_SCHEDULE)
    return replace(
        strategy,
        micro_batches=(parallel.micro_batches,) if parallel.micro_batches else MICRO_BATCHES,
        formats=strategy.formats if parallel.activations == "auto" else (parallel.activations,),
        schedules=(_DEFAULT_SCHEDULE, *others) if parallel.schedule == "auto" else (parallel.schedule,),
        sync=_COMPRESSED.get((strategy.sync, parallel.gradient_compression), strategy.sync),
    )


def _fixed(spec: StageSpec, parallel: Parallel) -> FixedStage:
    """Return what a job says about a stage; what the stage leaves out comes from the whole section."""
    sync = Sync(spec.how) if spec.how else _COMPRESSED.get((Sync.ALL_REDUCE, parallel.gradient_compression))
    return FixedStage(
        tuple(spec.ranks),
        tuple(spec.shares or [1.0] * len(spec.ranks)),
        sync if sync is not None and len(spec.ranks) > 1 else Sync.ALL_REDUCE,
        spec.send or ("fp32" if parallel.activations == "auto" else parallel.activations),
        (spec.layers[0], spec.layers[1] + 1) if spec.layers is not None else None,
    )


def _syncs(parallel: Parallel) -> set[Sync]:
    """Return the ways in which members of the stages of a job's plan may agree on gradients."""
    constraints = constraints_of(parallel)
    return {stage.sync for stage in constraints.stages} if constraints.stages is not None else {constraints.sync}


def uses_horovod(parallel: Parallel) -> bool:
    """Return whether a stage of the job's plan may sum its gradients with Horovod."""
    return not _syncs(parallel).isdisjoint({Sync.HOROVOD, Sync.HOROVOD_FP16})


def uses_powersgd(parallel: Parallel) -> bool:
    """Return whether a stage of the job's plan may sum its gradients with PowerSGD."""
    return Sync.POWERSGD in _syncs(parallel)
