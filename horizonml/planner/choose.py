"""Chooses the plan that a job asks for: for the least time or energy, with all devices or some, exact or not.

For energy: every device draws its idle watts while a step lasts, so fast plans save energy as well. What a plan for
less energy can do beyond that is to leave work to the devices that need the fewest joules for it. So the search is
repeated with the least efficient devices left out, more and more of them, and the best of these plans are improved by
small moves.

The energy of a step is the idle watts of all devices while it lasts, and what working adds to them.

Read it from above: `choose` checks what is possible; `with_objective` looks for less energy where that is asked for;
`fastest_plan` leaves out the ranks that slow the others down; `best_plan` decides how exact the plan is.

- A device may slow the others down: whoever works has to take part in sums, and to send and receive over its own link.
  So plans without the slowest machines are tried as well, and plans with fewer ranks on each machine, whose ranks may
  share its cores. In the end, a single rank always competes: where it is faster than all of them, it trains alone.
- Three kinds of plans compete: an exact one; one whose links and sums carry fewer bits; and one whose members take
  local steps. The exact one is taken unless another is clearly faster. Of the two others, local steps are taken unless
  fewer bits are clearly faster: devices that do not wait for one another keep to what was predicted far better. In the
  chosen plan, everything is then made more precise wherever that costs next to nothing.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from horizonml.errors import PlanError
from horizonml.job.schema import Job
from horizonml.plan.plan import Plan
from horizonml.plan.schedules import SCHEDULES
from horizonml.plan.syncs import FORMATS
from horizonml.planner.cost import fastest_format, fastest_sync
from horizonml.planner.evaluator import (
    PREFERENCE,
    Candidate,
    Evaluator,
    OutOfTime,
    improve,
    more_precise,
    other_shares,
    small_moves,
)
from horizonml.planner.problem import Problem
from horizonml.planner.replicas import local_plan
from horizonml.planner.search import (
    among,
    fastest_alone,
    on_fewer_ranks,
    outnumbers_cores,
    search,
    widened,
    without_slow_machines,
)
from horizonml.planner.simulate import Prediction
from horizonml.planner.strategies import fixed_plan, with_local_steps
from horizonml.text import count

_MOST_SETS = 8  # numbers of devices that are tried, for each order of them
_MOST_IMPROVED = 3  # sets of devices whose plans are improved
_MANY_RANKS = 200  # above which fewer sets of ranks are tried, and one search finds an exact plan for the rest
_SOME_RANKS = 32  # ranks, above which fewer sets are tried
_POWERS = ((0.25, 0.5, 0.75), (0.5, 0.75))  # of the number of devices: the sizes of such sets, up to 200 and above
_AT_ONCE = 800  # the most simulations of an improvement, divided by the devices


Planned = Callable[[Problem, Evaluator, Sequence[int]], Candidate | None]  # the plan in which only some ranks work


def least_energy(
    problem: Problem, evaluator: Evaluator, limit: float, fastest: Candidate, planned: Planned
) -> Candidate:
    """Return the plan with the least energy that was found among those whose step takes at most `limit` seconds.

    At worst, that is the fastest one.
    """
    working = tuple(rank for rank in range(problem.ranks) if rank not in fastest.plan.spare)
    found = [(working, fastest)]
    found += [(kept, one) for kept in _sets(evaluator) if (one := planned(problem, evaluator, kept)) is not None]
    found.sort(key=lambda one: _key(problem, limit, one[1]))
    most = _MOST_IMPROVED if problem.ranks <= _SOME_RANKS else 1
    better = [_improved(problem, evaluator, limit, kept, one) for kept, one in found[:most]]
    return min([*(one for _, one in found), *better], key=lambda one: _key(problem, limit, one))


def _key(part: Problem, limit: float, one: Candidate, others: float = 0.0) -> tuple[bool, float, bool, float, float]:
    """Return a sort key of a plan for a part of the devices, while the `others` draw so many watts.

    It says whether the plan can be carried out, whether it is too slow, and its energy. Of plans that are too slow, the
    fastest comes first.
    """
    energy, seconds = energy_of(part, one.prediction), one.prediction.seconds
    assert energy is not None
    joules = energy.joules + others * seconds
    return *one.cost[:2], seconds > limit, seconds if seconds > limit else joules, joules


def _sets(evaluator: Evaluator) -> Iterable[tuple[int, ...]]:
    """Return sets of devices that may do all the work: the most efficient, or the fastest, of some number."""
    problem, ranks = evaluator.problem, evaluator.problem.ranks
    seconds = [evaluator.seconds(rank, 0, problem.layers, 8) for rank in range(ranks)]
    joules = [watts.added * own for watts, own in zip(problem.watts, seconds, strict=True) if watts is not None]
    sizes = sorted({max(1, round(ranks ** (place / _MOST_SETS))) for place in range(_MOST_SETS)} | {ranks - 1})
    if ranks > _SOME_RANKS:
        sizes = sorted({round(ranks**power) for power in _POWERS[ranks > _MANY_RANKS]})
    if ranks <= _MOST_SETS:
        sizes = list(range(1, ranks))
    orders = [sorted(range(ranks), key=cost.__getitem__) for cost in (joules, seconds)[: 1 + (ranks <= _SOME_RANKS)]]
    return dict.fromkeys(tuple(sorted(order[:size])) for order in orders for size in sizes if 0 < size < ranks)


def _improved(problem: Problem, whole: Evaluator, limit: float, kept: Sequence[int], one: Candidate) -> Candidate:
    """Return a plan for the same devices to which small moves, and then other shares, lead."""
    part, place = among(problem, kept), {rank: number for number, rank in enumerate(kept)}
    evaluator = Evaluator(part, whole.deadline)
    idle = sum(own.idle for rank, own in enumerate(problem.watts) if own is not None and rank not in place)
    stages = tuple(replace(stage, ranks=tuple(place[rank] for rank in stage.ranks)) for stage in one.plan.stages)
    best = evaluator.judge(replace(one.plan, stages=stages, spare=()))
    for moves in (small_moves, other_shares) if one.plan.local is None else ():
        budget = max(20, _AT_ONCE // len(kept))
        best = improve(evaluator, best, budget, moves, cost=lambda found: _key(part, limit, found, idle))
    judged = whole.judge(widened(best.plan, kept, problem.ranks))
    return replace(judged, exact_seconds=one.exact_seconds)


@dataclass(frozen=True)
class Energy:
    """Holds the joules of a step by rank; of these, `working` are for computing and transfers."""

    by_rank: tuple[float, ...]
    working: float

    @property
    def joules(self) -> float:
        """Return the joules of all devices together."""
        return sum(self.by_rank)


def energy_of(problem: Problem, prediction: Prediction) -> Energy | None:
    """Return the energy of a step, or None if the watts of a device are not known.

    A device that is left out, or that waits, draws its idle watts. While it computes, sends or receives, it draws its
    busy watts.
    """
    known = [watts for watts in problem.watts if watts is not None]
    if len(known) != problem.ranks:
        return None
    added = [watts.added * prediction.working[rank] for rank, watts in enumerate(known)]
    idle = [watts.idle * prediction.seconds for watts in known]
    return Energy(tuple(a + b for a, b in zip(idle, added, strict=True)), sum(added))


def energy_facts(problem: Problem, found: Candidate) -> dict[str, object] | None:
    """Return a plan's energy as a JSON object, or None where the watts of a device are not known."""
    energy = energy_of(problem, found.prediction)
    if energy is None:
        return None
    facts: dict[str, object] = {
        "objective": problem.objective.kind,
        "joules_per_step": energy.joules,
        "joules_per_sample": energy.joules / problem.batch_size,
        "watts": energy.joules / found.prediction.seconds,
        "joules_by_rank": list(energy.by_rank),
        "left_out": list(found.plan.spare),
    }
    if found.fastest is not None:
        fastest = energy_of(problem, found.fastest.prediction)
        assert fastest is not None
        facts["fastest"] = {"seconds": found.fastest.prediction.seconds, "joules_per_step": fastest.joules}
    return facts


_ROUNDING = 1 + 1e-9
_LEAST = (60, 24)  # simulations of the search for a set, with up to that many ranks and with more
_IN_A_SET = 400  # the most simulations of the search for a set of devices, divided by the devices
_MOST_WORSE = 2  # sets in a row that are no better, after which smaller ones are not tried
# Ranks that outnumber the cores gain nothing that fewer cannot do, and wait for one another in more ways than are
# predicted: a plan without them may take so much longer on paper.
_A_CROWD_COSTS = 0.5


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
        worth, seconds = -PREFERENCE if asked else PREFERENCE, alone.prediction.seconds
        if best.exact_seconds is not None and seconds < best.exact_seconds:  # what is less exact has to be worth it
            best = replace(best, exact_seconds=seconds)
            worth = PREFERENCE
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
        if alone < (1 - PREFERENCE) * exactly and seconds >= (1 - PREFERENCE) * alone:
            return replace(exact, everyone_seconds=exactly)
        everyone = replace(everyone, exact_seconds=min(exactly, alone))
    best = exact
    if not problem.constraints.is_exact:
        found = planned(problem, evaluator, kept)
        best = found if found is not None and found.usable else exact
    crowded = outnumbers_cores(problem, everyone.plan) and not outnumbers_cores(problem, best.plan)
    if best.prediction.seconds >= (1 + _A_CROWD_COSTS if crowded else 1 - PREFERENCE) * seconds:
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
    if local is not None and not _saves(best, local):
        best = local
    if exact is None:
        exact = search(exactly, evaluator=Evaluator(exactly, evaluator.deadline))
    if not _saves(best, exact):
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


def _saves(one: Candidate, other: Candidate) -> bool:
    """Return whether one plan can run where another one cannot, or takes less time by what a preference may cost."""
    if one.cost[:2] != other.cost[:2]:
        return one.cost[:2] < other.cost[:2]
    return one.prediction.seconds < (1 - PREFERENCE) * other.prediction.seconds
