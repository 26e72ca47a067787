"""Makes the plan that a job asks for, choosing what the job leaves open by the predicted step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from horizonml.errors import PlanError
from horizonml.job.schema import Job
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.plan.schedules import SCHEDULES
from horizonml.plan.spec import Parallel
from horizonml.planner.evaluator import Candidate, Evaluator
from horizonml.planner.objective import Watts
from horizonml.planner.problem import NO_LOADING, Loading, Problem
from horizonml.planner.profile import Host, Network, Profile
from horizonml.planner.saving import with_objective
from horizonml.planner.strategies import constraints_of, objective_of
from horizonml.text import count


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
        objective_of(job.parallel, steps),
    )


def choose(job: Job, problem: Problem, evaluator: Evaluator | None = None) -> Candidate:
    """Return the best plan for the job's objective, of the kind that it asks for, among those that fit into memory.

    If no plan fits, return the one that comes nearest. `evaluator` is one for this problem, if any. Raises PlanError if
    the model has too few layers.
    """
    constraints, layers = problem.constraints, problem.layers
    needed = fewest = constraints.fewest_stages(problem.ranks)
    if constraints.stages is None and fewest > 1:
        needed *= min(SCHEDULES[name].stages_per_rank for name in constraints.schedules)
    if needed > layers or fewest > constraints.highest_stages(problem.ranks, layers):
        raise PlanError(
            f"{job.model.name} can be cut into at most {count(layers, 'stage')}, but the plan needs {needed}; use "
            "fewer workers, or strategy hybrid or ddp"
        )
    if constraints.cuts is not None:
        fixed_plan(job, layers, problem.ranks)  # raises PlanError, which names the stage that does not fit the model
    found = with_objective(problem, evaluator)
    return replace(found, plan=with_local_steps(found.plan, job.parallel))


def with_local_steps(plan: Plan, parallel: Parallel) -> Plan:
    """Return a plan with what the job says of local steps, if any of its stages takes them."""
    if parallel.sync is None or all(not stage.sync.steps_alone for stage in plan.stages):
        return plan
    return replace(plan, local=parallel.sync.local())
