"""Makes a plan more precise wherever that costs next to nothing: what links carry, and how members sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from horizonml.plan.plan import Plan, Stage
from horizonml.planner.cost import syncs_of
from horizonml.planner.evaluator import Candidate, Evaluator

_PRECISION_IS_WORTH = 0.02  # of a step's time: the most that more precise formats and sums may cost


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
