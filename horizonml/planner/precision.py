"""Chooses how exact a plan is, where a job leaves that open: it is less exact only where that saves enough time.

Three kinds of plans compete: an exact one; one whose links and sums carry fewer bits; and one whose members take local
steps. The exact one is taken unless another is clearly faster. In the chosen plan, everything is then made more
precise wherever that costs next to nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from horizonml.errors import PlanError
from horizonml.plan.lossy import UNTRIED
from horizonml.plan.plan import Plan, Sync
from horizonml.planner.cost import fastest_format
from horizonml.planner.evaluator import Candidate, Evaluator, OutOfTime
from horizonml.planner.problem import Problem
from horizonml.planner.refine import more_precise
from horizonml.planner.replicas import local_plan
from horizonml.planner.search import search
from horizonml.planner.syncs import fastest_sync

_MANY_RANKS = 200  # ranks, above which there is one search, for an exact plan, from which others are derived
EXACT_IS_WORTH = 0.05  # of a step's time: the most that an exact plan may cost
STEPPING_TOGETHER_IS_WORTH = 0.25  # of a step's time: the least that local steps must save


def best_plan(problem: Problem, evaluator: Evaluator | None = None) -> Candidate:
    """Return the best plan that was found among those that the constraints allow, as exact as is affordable.

    Raises PlanError if the constraints allow no plan for the model.
    """
    constraints = problem.constraints
    evaluator = evaluator or Evaluator(problem)
    if constraints.is_exact and (constraints.local is None or constraints.sync is Sync.LOCAL or constraints.stages):
        return search(problem, evaluator=evaluator)
    alone = _without_untried(evaluator)
    local = local_plan(alone)
    if local is not None:
        local = more_precise(alone, local)
    if constraints.local is not None:
        return _stepping_alone(problem, evaluator, local)
    exactly = replace(problem, constraints=constraints.exactly())
    exact = None
    if problem.ranks > _MANY_RANKS:
        exact = search(exactly, evaluator=Evaluator(exactly, evaluator.deadline))
        best = _with_fewer_bits(evaluator, exact.plan)
    else:
        best = search(problem, evaluator=evaluator)
    if local is not None and _saves(local, best, STEPPING_TOGETHER_IS_WORTH):
        best = local
    if exact is None:
        exact = search(exactly, evaluator=Evaluator(exactly, evaluator.deadline))
    if not _saves(best, exact, EXACT_IS_WORTH):
        return exact
    return replace(best, exact_seconds=exact.prediction.seconds if exact.usable else None)


def _with_fewer_bits(evaluator: Evaluator, exact: Plan) -> Candidate:
    """Return the faster of two plans: an exact one with the formats that take the least time, and ddp with them.

    For many devices, a search among plans that are not exact would take as long again as that for an exact one.
    """
    problem = evaluator.problem
    stages = [
        replace(stage, sync=fastest_sync(problem, stage.start, stage.stop, stage.ranks)) for stage in exact.stages
    ]
    for number, (stage, after) in enumerate(itertools.pairwise(stages)):
        stages[number] = replace(stage, send=fastest_format(problem, stage.ranks[0], after.ranks[0]))
    plans = [replace(exact, stages=tuple(stages))]
    if problem.constraints.fewest_stages(problem.ranks) == 1:
        plans.append(evaluator.plan([], [range(problem.ranks)], problem.micro_batches[0]))
    return more_precise(evaluator, min((evaluator.judge(plan) for plan in plans), key=lambda one: one.cost))


def _without_untried(evaluator: Evaluator) -> Evaluator:
    """Return an evaluator without the formats that runs try before they use them: with local steps nothing is tried."""
    formats = evaluator.problem.constraints.formats
    kept = tuple(name for name in formats if name not in UNTRIED)
    if len(formats) == 1 or kept == formats:
        return evaluator
    constraints = replace(evaluator.problem.constraints, formats=kept)
    return Evaluator(replace(evaluator.problem, constraints=constraints), evaluator.deadline)


def _stepping_alone(problem: Problem, evaluator: Evaluator, local: Candidate | None) -> Candidate:
    """Return the best plan for a job that asks for local steps: with them, or without a stage of several members."""
    alone = replace(problem, constraints=replace(problem.constraints, local=None, most_members=1))
    try:
        single = search(alone, evaluator=Evaluator(alone, evaluator.deadline))
    except OutOfTime:
        raise
    except PlanError:  # there are more ranks than layers
        if local is None:
            raise
        return local
    return min(single, local, key=lambda one: one.cost) if local is not None else single


def _saves(one: Candidate, other: Candidate, part: float) -> bool:
    """Return whether one plan can run where another one cannot, or takes so much less of its time."""
    if one.cost[:2] != other.cost[:2]:
        return one.cost[:2] < other.cost[:2]
    return one.prediction.seconds < (1 - part) * other.prediction.seconds
