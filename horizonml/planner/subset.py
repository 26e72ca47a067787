"""Plans for some of the devices, and turns their plans into plans of all, in which the others are left out.

A device may slow the others down: whoever works has to take part in sums, and to send and receive over its own link. So
plans without the slowest machines are tried as well, and plans with fewer ranks on each machine, whose ranks may share
its cores. In the end, a single rank always competes: where it is faster than all of them, it trains alone. Each
accelerator of a machine counts as a machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from horizonml.errors import PlanError
from horizonml.plan.plan import Plan, Stage
from horizonml.planner.evaluator import Candidate, Evaluator, OutOfTime
from horizonml.planner.precision import EXACT_IS_WORTH, STEPPING_TOGETHER_IS_WORTH, best_plan
from horizonml.planner.problem import Problem
from horizonml.planner.profile import Host
from horizonml.planner.search import search

MANY_RANKS = 200  # ranks, above which fewer sets are tried, with fewer simulations each
_LEAST = (60, 24)  # simulations of the search for a set, with up to that many ranks and with more
_IN_A_SET = 800  # the most simulations of the search for a set of devices, divided by the devices
_MOST_MACHINES = 32  # up to which plans without some of them are tried
_MOST_TRIED = 8  # numbers of machines, for each order of them
_MOST_WORSE = 2  # sets in a row that are no better, after which smaller ones are not tried
_ALL_ARE_WORTH = 0.05  # of a step's time: the least that leaving ranks out must save
# Ranks that outnumber the cores gain nothing that fewer cannot do, and wait for one another in more ways than are
# predicted: a plan without them may take so much longer on paper.
_A_CROWD_COSTS = 0.5
_SEVERAL_ARE_WORTH = 0.02  # of a step's time: the least that several ranks must save against a single one
_MOST_ALONE = 4  # ranks whose plans are compared to find the one that is fastest alone


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
            worth = STEPPING_TOGETHER_IS_WORTH if best.plan.local is not None else EXACT_IS_WORTH
        if best.prediction.seconds < (1 - worth) * seconds:
            return best
    return replace(alone, everyone_seconds=everyone.prediction.seconds if everyone.usable else math.inf)


def fastest_alone(problem: Problem, evaluator: Evaluator) -> Candidate:
    """Return the fastest plan in which one rank does all the work, which is exact, and the others are spare."""
    ranks = sorted(range(problem.ranks), key=lambda rank: sum(evaluator.times.passes(rank, 0, problem.layers, 8)))
    roomy = max(range(problem.ranks), key=lambda rank: problem.memory[rank])
    schedule = problem.constraints.schedules[0]
    plans = [
        widened(Plan((Stage(0, problem.layers, (0,), (1.0,)),), schedule, number), (rank,), problem.ranks)
        for rank in dict.fromkeys((*ranks[:_MOST_ALONE], roomy))
        for number in problem.micro_batches[:8]
    ]
    return min((evaluator.judge(plan) for plan in plans), key=lambda one: one.cost)


def _with_fewer(problem: Problem, evaluator: Evaluator, everyone: Candidate) -> Candidate:
    """Return a plan that leaves ranks out, if that is clearly faster than the best plan for `everyone`."""
    exact, kept = _fastest_exact_set(problem, evaluator, everyone.usable)
    if exact is None:
        return everyone
    seconds = everyone.prediction.seconds if everyone.usable else math.inf
    if everyone.usable and everyone.exact_seconds is not None:  # it is less exact, which has to be worth it still
        exactly, alone = everyone.exact_seconds, exact.prediction.seconds
        worth = STEPPING_TOGETHER_IS_WORTH if everyone.plan.local is not None else EXACT_IS_WORTH
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
    for sets in (_on_fewer_ranks(problem), *_without_slow_machines(evaluator, has_memory)):
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


def _on_fewer_ranks(problem: Problem) -> list[tuple[int, ...]]:
    """Return smaller sets of ranks, for machines that several share: as many as there are cores, and half of them.

    A set of one rank is not among them: see `fastest_alone`.
    """
    machines = list(problem.machines.values())
    most = max(map(len, machines))
    if len(machines) > _MOST_MACHINES:
        return []
    cores = {rank: max(1, int(host.machine_cores or host.cores)) for host in problem.hosts for rank in host.ranks}
    sizes = {most // 2, max(min(len(own), cores[own[0]]) for own in machines)}
    sets = (
        tuple(sorted(rank for own in machines for rank in own[:size])) for size in sorted(sizes, reverse=True) if size
    )
    return [kept for kept in sets if 1 < len(kept) < problem.ranks]


def outnumbers_cores(problem: Problem, plan: Plan) -> bool:
    """Return whether more ranks work on a machine than it has cores for, as far as no quota holds them back."""
    host, spare = {rank: host for host in problem.hosts for rank in host.ranks}, set(plan.spare)
    return any(
        sum(host[rank].demand for rank in ranks if rank not in spare)
        > max(1.0, host[ranks[0]].machine_cores or host[ranks[0]].cores)
        for ranks in problem.machines.values()
    )


def _without_slow_machines(evaluator: Evaluator, has_memory: bool) -> Iterator[list[tuple[int, ...]]]:
    """Yield lists of smaller and smaller sets of ranks: those of the fastest machines, and of the best connected."""
    problem = evaluator.problem
    groups = list(problem.machines.values())
    if not 1 < len(groups) <= _MOST_MACHINES:
        return
    seconds = {rank: evaluator.seconds(rank, 0, problem.layers, 8) for group in groups for rank in group}

    def link(group: list[int]) -> float:
        others = [other for one in groups if one is not group for other in one]
        return max(problem.network.between(rank, other).bandwidth for rank in group for other in others)

    orders = [
        sorted(groups, key=lambda group: 1 / sum(1 / max(1e-12, seconds[rank]) for rank in group)),
        sorted(groups, key=link, reverse=True),
    ]
    if not has_memory:
        orders.append(sorted(groups, key=lambda group: -min(problem.memory[rank] for rank in group)))
    step = -(-(len(groups) - 1) // _MOST_TRIED)
    sizes = range(len(groups) - 1, 0, -step)
    for order in orders:
        yield [tuple(sorted(rank for group in order[:size] for rank in group)) for size in sizes]


def planned(problem: Problem, evaluator: Evaluator, kept: Sequence[int]) -> Candidate | None:
    """Return the fastest plan of all ranks in which only the ranks `kept` work, or None if these allow no plan.

    It has no local steps: a rank that holds no layers has no part in them.
    """
    part = among(problem, kept)
    part = replace(part, constraints=replace(part.constraints, every=()))
    own = Evaluator(part, evaluator.deadline)
    try:
        if part.constraints.is_exact and part.constraints.local is None:
            best = search(part, max(_LEAST[problem.ranks > MANY_RANKS], _IN_A_SET // len(kept)), own)
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


def among(problem: Problem, kept: Sequence[int]) -> Problem:
    """Return the problem of some of the ranks alone, which are numbered anew in this order."""
    place = {rank: number for number, rank in enumerate(kept)}
    hosts: list[Host] = []
    for host in problem.hosts:
        ranks = tuple(place[rank] for rank in host.ranks if rank in place)
        if ranks:
            hosts.append(replace(host, ranks=ranks))
    return replace(
        problem,
        profiles=[problem.profiles[rank] for rank in kept],
        hosts=hosts,
        network=problem.network.among(kept),
        watts=[problem.watts[rank] for rank in kept if problem.watts],
    )


def widened(plan: Plan, kept: Sequence[int], ranks: int) -> Plan:
    """Return a plan of the ranks `kept` as one of all ranks, in which the others are spare."""
    stages = tuple(replace(stage, ranks=tuple(kept[rank] for rank in stage.ranks)) for stage in plan.stages)
    spare = tuple(rank for rank in range(ranks) if rank not in set(kept))
    return replace(plan, stages=stages, spare=spare)
