"""Improves plans: by small moves while one helps, and by more precise formats and sums wherever they cost little."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from horizonml.plan.plan import Plan, Stage
from horizonml.planner.cost import syncs_of
from horizonml.planner.evaluator import Candidate, Evaluator

_PRECISION_IS_WORTH = 0.02  # of a step's time: the most that more precise formats and sums may cost
_FEW_RANKS = 16  # ranks, up to which every device may move anywhere
_MANY_RANKS = 200  # ranks, above which no device moves, because each simulation takes long
_LESS = (0.5, 0.8, 1.25, 2.0)  # factors by which a member's share is tried

Groups = list[list[int]]
_Make = Callable[[list[int], Groups, int], Plan]  # makes a plan from its cuts, groups and micro-batches


def improve(
    evaluator: Evaluator,
    found: Candidate,
    budget: int,
    moves: Callable[[Evaluator, Plan], Iterable[Plan]],
    judge: Callable[[Evaluator, Plan], Candidate | None] = Evaluator.judge,
    cost: Callable[[Candidate], Any] = lambda one: one.cost,
) -> Candidate:
    """Return the best plan that `moves` lead to, one after the other, until none helps or `budget` is spent.

    `judge` returns what becomes of a plan, or None if it cannot be used.
    """
    best, end = found, evaluator.evaluations + budget
    while True:
        before = best
        for plan in moves(evaluator, best.plan):
            if evaluator.evaluations >= end:
                return best
            best = min(best, judge(evaluator, plan) or best, key=cost)
        if best is before:
            return best


def small_moves(evaluator: Evaluator, plan: Plan) -> Iterator[Plan]:
    """Yield plans that differ a little from this one, among those that the constraints allow."""
    problem = evaluator.problem
    constraints = problem.constraints
    cuts, groups = [stage.start for stage in plan.stages[1:]], [list(stage.ranks) for stage in plan.stages]

    def make(cuts: list[int], groups: Groups, micro_batches: int) -> Plan:
        return evaluator.plan(cuts, groups, micro_batches, plan.schedule)

    place = _place(evaluator, plan)
    for near in (place - 1, place + 1, place + 2):
        if 0 <= near < len(problem.micro_batches):
            yield make(cuts, groups, problem.micro_batches[near])
    yield make(cuts, groups, plan.micro_batches)  # with the shares of this search
    if constraints.cuts is None:
        reach = 16 if problem.ranks <= _FEW_RANKS else 2
        for number, cut in enumerate(cuts):
            lowest, highest = [0, *cuts][number] + 1, [*cuts, problem.layers][number + 1] - 1
            for other in range(max(lowest, cut - reach), min(highest, cut + reach) + 1):
                if other != cut:
                    yield make([*cuts[:number], other, *cuts[number + 1 :]], groups, plan.micro_batches)
    one_stage_each = len(plan.lanes) == len(plan.stages)
    if constraints.cuts is None and not one_stage_each:
        yield from _slid(evaluator, plan, cuts, groups, make)
    if constraints.ordered or constraints.stages is not None or problem.ranks > _MANY_RANKS or not one_stage_each:
        return
    for changed in itertools.chain(
        _moved(evaluator, plan, cuts, groups, make),
        _exchanged(evaluator, plan, cuts, groups, make),
        _split(evaluator, plan, cuts, groups, make),
    ):
        number = len(changed.stages)
        fewest = constraints.fewest_stages(problem.ranks)
        if fewest <= number <= constraints.highest_stages(problem.ranks, problem.layers):
            yield changed


def _place(evaluator: Evaluator, plan: Plan) -> int:
    """Return the position of a plan's number of micro-batches among the allowed numbers."""
    counts = evaluator.problem.micro_batches
    return counts.index(plan.micro_batches) if plan.micro_batches in counts else 0


def _slid(evaluator: Evaluator, plan: Plan, cuts: list[int], groups: Groups, make: _Make) -> Iterator[Plan]:
    """Yield plans in which some consecutive stages keep their sizes, and only the stages around them change.

    One cut alone does not change the total work of a rank with several stages.
    """
    for first, end in itertools.combinations(range(len(cuts) + 1), 2):
        for by in (-2, -1, 1, 2):
            slid = [*cuts[:first], *(cut + by for cut in cuts[first:end]), *cuts[end:]]
            bounds = [0, *slid, evaluator.problem.layers]
            if end - first > 1 and all(a < b for a, b in itertools.pairwise(bounds)):
                yield make(slid, groups, plan.micro_batches)


def _moved(evaluator: Evaluator, plan: Plan, cuts: list[int], groups: Groups, make: _Make) -> Iterator[Plan]:
    """Yield plans in which one device belongs to another stage."""
    few = evaluator.problem.ranks <= _FEW_RANKS
    for source, target in itertools.permutations(range(len(groups)), 2):
        for rank in groups[source] if few else groups[source][:1] + groups[source][-1:]:
            others = [[r for r in group if r != rank] for group in groups]
            others[target] = [*others[target], rank]
            if others[source]:
                yield make(cuts, others, plan.micro_batches)
            else:  # its stage disappears, and the neighbour takes the layers
                gone = source if source < len(cuts) else source - 1
                left = [cut for index, cut in enumerate(cuts) if index != gone]
                yield make(left, [group for group in others if group], plan.micro_batches)


def _exchanged(evaluator: Evaluator, plan: Plan, cuts: list[int], groups: Groups, make: _Make) -> Iterator[Plan]:
    """Yield plans in which two stages, or two of their devices, are exchanged."""
    counts, place = evaluator.problem.micro_batches, _place(evaluator, plan)
    for one, other in itertools.combinations(range(len(groups)), 2):
        exchanged = list(groups)
        exchanged[one], exchanged[other] = groups[other], groups[one]
        for near in range(max(0, place - 2), min(len(counts), place + 3)):
            yield make(cuts, exchanged, counts[near])
        if evaluator.problem.ranks > _FEW_RANKS:
            continue
        for a, b in itertools.product(groups[one], groups[other]):
            swap = {a: b, b: a}
            yield make(cuts, [[swap.get(r, r) for r in group] for group in groups], plan.micro_batches)


def _split(evaluator: Evaluator, plan: Plan, cuts: list[int], groups: Groups, make: _Make) -> Iterator[Plan]:
    """Yield plans in which one device of a stage forms a new stage with some of its layers."""
    if evaluator.problem.ranks > _FEW_RANKS:
        return
    for number, group in enumerate(groups):
        start, stop = [0, *cuts][number], [*cuts, evaluator.problem.layers][number]
        for cut in range(start + 1, stop):
            for rank in group if len(group) > 1 else ():
                rest = [r for r in group if r != rank]
                for pair in ([rank], rest), (rest, [rank]):
                    between = [*groups[:number], *pair, *groups[number + 1 :]]
                    yield make([*cuts[:number], cut, *cuts[number:]], between, plan.micro_batches)


def other_shares(evaluator: Evaluator, plan: Plan) -> Iterator[Plan]:
    """Yield plans in which one member of a stage has a larger or a smaller share."""
    for number, stage in enumerate(plan.stages):
        for place in range(len(stage.ranks)) if len(stage.ranks) > 1 else ():
            for factor in _LESS:
                shares = tuple(share * (factor if own == place else 1) for own, share in enumerate(stage.shares))
                stages = list(plan.stages)
                stages[number] = replace(stage, shares=shares)
                yield replace(plan, stages=tuple(stages))


def more_precise(evaluator: Evaluator, found: Candidate) -> Candidate:
    """Return the same plan with more precise formats and sums wherever they cost next to nothing."""
    limit = found.prediction.seconds * (1 + _PRECISION_IS_WORTH)
    for number in range(len(found.plan.stages)):
        for ways in (_formats, _sums):
            for stage in ways(evaluator, found.plan, number):
                other = evaluator.judge(with_stage(found.plan, number, stage))
                if other.prediction.seconds <= limit and len(other.prediction.lacking) <= len(found.prediction.lacking):
                    found = other
                    break
    return found


def with_stage(plan: Plan, number: int, stage: Stage) -> Plan:
    """Return a plan with another stage in the place of one of its stages."""
    return replace(plan, stages=(*plan.stages[:number], stage, *plan.stages[number + 1 :]))


def _formats(evaluator: Evaluator, plan: Plan, number: int) -> Iterator[Stage]:
    """Yield a stage with the formats that are more precise than its own, the most precise first."""
    formats, stage = evaluator.problem.constraints.formats, plan.stages[number]
    if number + 1 < len(plan.stages) and stage.send in formats:
        yield from (replace(stage, send=format) for format in formats[: formats.index(stage.send)])


def _sums(evaluator: Evaluator, plan: Plan, number: int) -> Iterator[Stage]:
    """Yield a stage with the ways to sum that are more precise than its own, the most precise first."""
    syncs, stage = syncs_of(evaluator.problem), plan.stages[number]
    if len(stage.ranks) > 1 and stage.sync in syncs:
        yield from (replace(stage, sync=sync) for sync in syncs[: syncs.index(stage.sync)])
