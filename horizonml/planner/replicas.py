"""Proposes plans whose members take local steps: replicas of a pipeline, or of the model, that rarely synchronise.

All stages of such a plan have equally many members with the same shares, so that a replica's stages send only
to each other. Devices that are well connected form a replica; fast replicas take more of each batch, and so more local
steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from horizonml.plan.plan import NO_ROWS, Plan, Stage
from horizonml.plan.syncs import Sync
from horizonml.planner.cost import fastest_format, gentlest
from horizonml.planner.evaluator import PREFERENCE, Candidate, Evaluator, improve
from horizonml.planner.problem import Constraints, FixedStage
from horizonml.planner.programme import Programme

_FEW_RANKS = 16  # ranks, up to which plans are improved by small moves
_MANY_REPLICAS = 64  # ranks, above which few plans are tried
_MOST_JUDGED = (24, 4)  # plans that are simulated, with up to that many ranks and with more
_MOST_MOVES = 60
_ROUNDS = 3  # of cutting by shares, and sharing by cuts

Groups = list[list[int]]  # the ranks of each replica, in the order of its stages


def local_plan(evaluator: Evaluator) -> Candidate | None:
    """Return the best plan that was found whose members take local steps, or None if the constraints allow none."""
    problem = evaluator.problem
    constraints = problem.constraints
    if not (constraints.every or constraints.local) or problem.ranks == 1 or constraints.stages is not None:
        return None
    plans = sorted({plan: _estimate(evaluator, plan) for plan in _proposed(evaluator)}.items(), key=lambda one: one[1])
    most = _MOST_JUDGED[problem.ranks > _MANY_REPLICAS]
    judged = [_judged(evaluator, plan) for plan, _ in plans[:most]]
    best = min((one for one in judged if one is not None), key=lambda one: one.cost, default=None)
    if best is None or problem.ranks > _FEW_RANKS:
        return best
    return improve(evaluator, best, _MOST_MOVES, _moves, _judged)


def _judged(evaluator: Evaluator, plan: Plan) -> Candidate | None:
    """Return a plan with the gentlest local steps that cost little of it, or None if there are none."""
    local = plan.local or gentlest(evaluator.problem, plan, _estimate(evaluator, plan))
    if local is None:
        return None
    found = evaluator.judge(replace(plan, local=local))
    computing = found.prediction.seconds - found.prediction.parts.get("agreeing on local steps", 0.0)
    better = gentlest(evaluator.problem, plan, computing)
    return evaluator.judge(replace(plan, local=better)) if better not in (None, local) else found


def _proposed(evaluator: Evaluator) -> Iterator[Plan]:
    """Yield plans for every number of stages that gives all replicas equally many ranks, without their local steps."""
    problem = evaluator.problem
    sizes = [size for size in range(1, problem.ranks) if problem.ranks % size == 0 and size <= problem.layers]
    many = problem.ranks > _MANY_REPLICAS
    counts = problem.micro_batches[:: 4 if many else 2]
    for size in sizes[:3] if many else sizes:
        found = itertools.islice(_groupings(evaluator, size), 1 if many else None)
        for groups in {tuple(map(tuple, one)): one for one in found}.values():
            for micro_batches in counts:
                plan = _plan(evaluator, groups, micro_batches)
                if plan is not None:
                    yield plan


def _groupings(evaluator: Evaluator, size: int) -> Iterator[Groups]:
    """Yield ways to form replicas of `size` ranks: by links, then by speed, with equal and with mixed replicas."""
    problem = evaluator.problem
    fast = sorted(range(problem.ranks), key=lambda rank: evaluator.seconds(rank, 0, problem.layers, 8))
    replicas = problem.ranks // size
    if size == 1:
        yield [[rank] for rank in fast]
        return
    left, islands = list(fast), []
    while left:
        island = [left.pop(0)]
        while len(island) < size:
            near = max(left, key=lambda rank: min(problem.network.between(rank, one).bandwidth for one in island))
            island.append(near)
            left.remove(near)
        islands.append(sorted(island, key=fast.index))
    yield islands
    yield [fast[place::replicas] for place in range(replicas)]
    yield [fast[first : first + size] for first in range(0, len(fast), size)]


def _plan(evaluator: Evaluator, groups: Groups, micro_batches: int, cuts: Sequence[int] | None = None) -> Plan | None:
    """Return the plan of these replicas, with the best cuts unless they are given, and with shares by speed."""
    problem, count = evaluator.problem, len(groups[0])
    if problem.batch_size < micro_batches * len(groups):  # a micro-batch has rows for every replica
        return None
    stages = [tuple(group[place] for group in groups) for place in range(count)]
    rows = -(-problem.batch_size // micro_batches)
    shares = (1.0,) * len(groups)
    for _ in range(_ROUNDS):
        own = cuts if cuts is not None else _cuts(evaluator, stages, shares, micro_batches)
        if own is None:
            return None
        bounds = list(itertools.pairwise([0, *own, problem.layers]))
        slowest = [  # of an equal part, which each replica computes on at a time
            max(evaluator.seconds(rank, *bound, rows / len(groups)) for rank, bound in zip(group, bounds, strict=True))
            for group in groups
        ]
        shares = tuple(1 / max(seconds, 1e-12) for seconds in slowest)
    asked = problem.constraints.local
    is_varied = asked is None or asked.every > 1
    made = [
        Stage(*bound, ranks, _rows(problem.profiles[0].least_rows, rows, shares, is_varied), Sync.LOCAL)
        for bound, ranks in zip(bounds, stages, strict=True)
    ]
    for number, (stage, after) in enumerate(itertools.pairwise(made)):
        made[number] = replace(stage, send=_format(evaluator, stage, after))
    return Plan(tuple(made), problem.constraints.schedules[0], micro_batches)


def _format(evaluator: Evaluator, stage: Stage, after: Stage) -> str:
    """Return the format that the slowest of the links between members of two stages should carry."""
    network = evaluator.problem.network
    pairs = zip(stage.ranks, after.ranks, strict=True)
    return fastest_format(evaluator.problem, *min(pairs, key=lambda pair: network.between(*pair).bandwidth))


def _rows(least: int, rows: int, shares: Sequence[float], is_varied: bool) -> tuple[float, ...]:
    """Return shares that give each replica rows of a micro-batch, so that the last one ends as early as it can.

    A replica has none, or at least so many; `shares` are proportional to the replicas' speeds. Rows need not be whole,
    as they are those of a step on average, but they are unless that takes clearly longer, or `is_varied` is not set.
    """
    own = [math.floor(rows * share / sum(shares)) for share in shares]
    whole = [count if count >= least else 0 for count in own]
    while (left := rows - sum(whole)) > 0:
        more = [1 if count else least for count in whole]
        places = [place for place, step in enumerate(more) if step <= left] or range(len(whole))
        first = min(places, key=lambda place: (whole[place] + more[place]) / shares[place])
        whole[first] += more[first]
    slowest = max(count / share for count, share in zip(whole, shares, strict=True)) * sum(shares) / rows
    mean = [round(rows * share / sum(shares), 2) for share in shares]
    if is_varied and slowest > 1 + PREFERENCE and min(mean) * rows >= least * sum(mean):
        return tuple(mean)
    return tuple(float(count) if count else NO_ROWS for count in whole)


def _cuts(
    evaluator: Evaluator, stages: Sequence[tuple[int, ...]], shares: tuple[float, ...], micro_batches: int
) -> Sequence[int] | None:
    """Return where to cut the layers for these stages, by dynamic programming; None if there are too few layers."""
    if len(stages) == 1:
        return ()
    problem = evaluator.problem
    fixed = Constraints(
        stages=tuple(FixedStage(ranks, shares, Sync.LOCAL, "fp32") for ranks in stages),
        formats=problem.constraints.formats,
    )
    programme = Programme(Evaluator(replace(problem, constraints=fixed), evaluator.deadline))
    found = next(programme.splits(stages, micro_batches), None)
    return found[0] if found is not None else None


def _estimate(evaluator: Evaluator, plan: Plan) -> float:
    """Return about how long a step of a plan takes without synchronisations."""
    rows = -(-evaluator.problem.batch_size // plan.micro_batches)
    times = [evaluator.slowest(stage, rows) for stage in plan.stages]
    return (plan.micro_batches - 1) * max(times) + sum(times)


def _moves(evaluator: Evaluator, plan: Plan) -> Iterator[Plan]:
    groups = [list(group) for group in zip(*(stage.ranks for stage in plan.stages), strict=True)]
    cuts = [stage.start for stage in plan.stages[1:]]
    counts = evaluator.problem.micro_batches
    place = counts.index(plan.micro_batches) if plan.micro_batches in counts else 0
    made = [_plan(evaluator, groups, counts[near], cuts) for near in (place - 1, place + 1) if 0 <= near < len(counts)]
    for number, cut in enumerate(cuts):
        for other in (cut - 1, cut + 1):
            moved = [*cuts[:number], other, *cuts[number + 1 :]]
            if all(a < b for a, b in itertools.pairwise([0, *moved, evaluator.problem.layers])):
                made.append(_plan(evaluator, groups, plan.micro_batches, moved))
    if len(cuts):
        flat = [rank for group in groups for rank in group]
        for a, b in itertools.combinations(flat, 2):
            swap = {a: b, b: a}
            swapped = [[swap.get(rank, rank) for rank in group] for group in groups]
            made.append(_plan(evaluator, swapped, plan.micro_batches))
    yield from (one for one in made if one is not None)
