"""Chooses the plan that a job asks for: for the least time or energy, with all devices or some, exact or not.

Read it from above: `choose` checks what is possible; `with_objective` looks for less energy where that is asked for;
`fastest_plan` leaves out the ranks that slow the others down; `best_plan` decides how exact the plan is.

- A device may slow the others down: whoever works has to take part in sums, and to send and receive over its own link.
  So plans without the slowest machines are tried as well, and plans with fewer ranks on each machine, whose ranks may
  share its cores. In the end, a single rank always competes: where it is faster than all of them, it trains alone.
- Three kinds of plans compete: an exact one; one whose links and sums carry fewer bits; and one whose members take
  local steps. The exact one is taken unless another is clearly faster. In the chosen plan, everything is then made more
  precise wherever that costs next to nothing.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from horizonml.errors import PlanError
from horizonml.job.schema import Job
from horizonml.plan.plan import Plan
from horizonml.plan.schedules import SCHEDULES
from horizonml.plan.syncs import FORMATS
from horizonml.planner.cost import fastest_format, fastest_sync
from horizonml.planner.energy import energy_of, least_energy
from horizonml.planner.evaluator import Candidate, Evaluator, OutOfTime
from horizonml.planner.problem import Problem
from horizonml.planner.refine import more_precise
from horizonml.planner.replicas import local_plan
from horizonml.planner.search import search
from horizonml.planner.strategies import fixed_plan, with_local_steps
from horizonml.planner.subset import (
    among,
    fastest_alone,
    on_fewer_ranks,
    outnumbers_cores,
    widened,
    without_slow_machines,
)
from horizonml.text import count

_ROUNDING = 1 + 1e-9
_LEAST = (60, 24)  # simulations of the search for a set, with up to that many ranks and with more
_IN_A_SET = 800  # the most simulations of the search for a set of devices, divided by the devices
_MOST_WORSE = 2  # sets in a row that are no better, after which smaller ones are not tried
_ALL_ARE_WORTH = 0.05  # of a step's time: the least that leaving ranks out must save
# Ranks that outnumber the cores gain nothing that fewer cannot do, and wait for one another in more ways than are
# predicted: a plan without them may take so much longer on paper.
_A_CROWD_COSTS = 0.5
_SEVERAL_ARE_WORTH = 0.02  # of a step's time: the least that several ranks must save against a single one
_MANY_RANKS = 200  # ranks, above which fewer sets of ranks are tried, and one search finds an exact plan for the rest
_EXACT_IS_WORTH = 0.05  # of a step's time: the most that an exact plan may cost
_STEPPING_TOGETHER_IS_WORTH = 0.25  # of a step's time: the least that local steps must save


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


def with_objective(problem: Problem, evaluator: Evaluator | None = None) -> Candidate:
    """Return the best plan that was found for the problem's objective. Raises PlanError if there is none.

    Where it is not the fastest one, that is its `fastest`. If no plan meets a deadline, it is the fastest.
    """
    evaluator = evaluator or Evaluator(problem)
    with _uncollected():
        fastest = fastest_plan(problem, evaluator)
        known = len([watts for watts in problem.watts if watts is not None]) == problem.ranks
        if problem.objective.kind == "time" or not known or problem.constraints.ordered or problem.constraints.stages:
            return fastest
        if not fastest.usable:
            return replace(fastest, fastest=fastest)
        limit = problem.objective.limit(fastest.prediction.seconds) * _ROUNDING
        return replace(least_energy(problem, evaluator, limit, fastest, planned), fastest=fastest)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Put off collections of cyclic garbage: a search makes none, and would spend nearly half of its time on them."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def is_better(problem: Problem, one: Candidate, present: Candidate, part: float) -> bool:
    """Return whether a plan saves so large a part of what the problem's objective asks to save.

    A plan that is too slow for the objective is better replaced by any that is not.
    """
    if not one.usable:
        return False
    now, then = (energy_of(problem, found.prediction) for found in (present, one))
    seconds, before = one.prediction.seconds, present.prediction.seconds
    if problem.objective.kind == "time" or now is None or then is None:
        return seconds < (1 - part) * before
    limit = problem.objective.limit((one.fastest or one).prediction.seconds)
    if before > (1 + part) * limit:
        return seconds < (1 - part) * before
    return then.joules < (1 - part) * now.joules


def fastest_plan(problem: Problem, evaluator: Evaluator) -> Candidate:
    """Return the fastest plan that was found, without the ranks that would slow the others down.

    Raises PlanError if the constraints allow no plan.
    """
    best = everyone = best_plan(problem, evaluator)
    constraints = problem.constraints
    if constraints.ordered or constraints.stages is not None or problem.ranks == 1:
        return everyone
    try:
        if constraints.local is None:
            best = _with_fewer(problem, evaluator, everyone)
        return _or_one(problem, evaluator, best, everyone)
    except OutOfTime:
        return best


def _or_one(problem: Problem, evaluator: Evaluator, best: Candidate, everyone: Candidate) -> Candidate:
    """Return the plan in which a single rank works, unless the `best` one is faster by what that is worth."""
    alone = fastest_alone(problem, evaluator)
    if not alone.usable or len(best.plan.spare) == problem.ranks - 1:
        return best
    if best.usable:
        asked = problem.constraints.local is not None  # for local steps, which several ranks take
        worth, seconds = -_SEVERAL_ARE_WORTH if asked else _SEVERAL_ARE_WORTH, alone.prediction.seconds
        if best.exact_seconds is not None and seconds < best.exact_seconds:  # what is less exact has to be worth it
            best = replace(best, exact_seconds=seconds)
            worth = _STEPPING_TOGETHER_IS_WORTH if best.plan.local is not None else _EXACT_IS_WORTH
        if best.prediction.seconds < (1 - worth) * seconds:
            return best
    return replace(alone, everyone_seconds=everyone.prediction.seconds if everyone.usable else math.inf)


def _with_fewer(problem: Problem, evaluator: Evaluator, everyone: Candidate) -> Candidate:
    """Return a plan that leaves ranks out, if that is clearly faster than the best plan for `everyone`."""
    exact, kept = _fastest_exact_set(problem, evaluator, everyone.usable)
    if exact is None:
        return everyone
    seconds = everyone.prediction.seconds if everyone.usable else math.inf
    if everyone.usable and everyone.exact_seconds is not None:  # it is less exact, which has to be worth it still
        exactly, alone = everyone.exact_seconds, exact.prediction.seconds
        worth = _STEPPING_TOGETHER_IS_WORTH if everyone.plan.local is not None else _EXACT_IS_WORTH
        if alone < (1 - _ALL_ARE_WORTH) * exactly and seconds >= (1 - worth) * alone:
            return replace(exact, everyone_seconds=exactly)
        everyone = replace(everyone, exact_seconds=min(exactly, alone))
    best = exact
    if not problem.constraints.is_exact:
        found = planned(problem, evaluator, kept)
        best = found if found is not None and found.usable else exact
    crowded = outnumbers_cores(problem, everyone.plan) and not outnumbers_cores(problem, best.plan)
    if best.prediction.seconds >= (1 + _A_CROWD_COSTS if crowded else 1 - _ALL_ARE_WORTH) * seconds:
        return everyone
    return replace(best, everyone_seconds=seconds)


def _fastest_exact_set(
    problem: Problem, evaluator: Evaluator, has_memory: bool
) -> tuple[Candidate | None, tuple[int, ...]]:
    """Return the fastest exact plan that leaves ranks out, and the ranks that work in it; None if there is none.

    `has_memory` says whether a plan for all fits into memory; otherwise those with the least memory are left out, too.
    """
    exactly = replace(problem, constraints=problem.constraints.exactly())
    best: Candidate | None = None
    found: tuple[int, ...] = ()
    tried = set[tuple[int, ...]]()
    for sets in (on_fewer_ranks(problem), *without_slow_machines(evaluator, has_memory)):
        worse = 0
        for kept in sets:
            if kept in tried:
                continue
            tried.add(kept)
            one = planned(exactly, evaluator, kept)
            if one is not None and one.usable and (best is None or one.cost < best.cost):
                best, found, worse = one, kept, 0
            else:
                worse += 1
            if worse == _MOST_WORSE:
                break
    return best, found


def planned(problem: Problem, evaluator: Evaluator, kept: Sequence[int]) -> Candidate | None:
    """Return the fastest plan of all ranks in which only the ranks `kept` work, or None if these allow no plan.

    It has no local steps: a rank that holds no layers has no part in them.
    """
    part = among(problem, kept)
    part = replace(part, constraints=replace(part.constraints, every=()))
    own = Evaluator(part, evaluator.deadline)
    try:
        if part.constraints.is_exact and part.constraints.local is None:
            best = search(part, max(_LEAST[problem.ranks > _MANY_RANKS], _IN_A_SET // len(kept)), own)
        else:
            best = best_plan(part, own)
    except OutOfTime:
        raise
    except PlanError:
        return None
    if best.plan.local is not None:
        return None
    judged = evaluator.judge(widened(best.plan, kept, problem.ranks))
    return replace(judged, exact_seconds=best.exact_seconds)


def best_plan(problem: Problem, evaluator: Evaluator | None = None) -> Candidate:
    """Return the best plan that was found among those that the constraints allow, as exact as is affordable.

    Raises PlanError if the constraints allow no plan for the model.
    """
    constraints = problem.constraints
    evaluator = evaluator or Evaluator(problem)
    if constraints.is_exact and (constraints.local is None or constraints.sync.steps_alone or constraints.stages):
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
    if local is not None and _saves(local, best, _STEPPING_TOGETHER_IS_WORTH):
        best = local
    if exact is None:
        exact = search(exactly, evaluator=Evaluator(exactly, evaluator.deadline))
    if not _saves(best, exact, _EXACT_IS_WORTH):
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
    kept = tuple(name for name in formats if not FORMATS[name].tried_first)
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
