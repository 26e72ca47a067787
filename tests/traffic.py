"""What the planner predicts that travels in a step, from its list of tasks and its formulas of sums."""

from __future__ import annotations

from dataclasses import dataclass

from horizonml.plan.plan import Plan
from horizonml.planner.cost import LayerTimes, summed_bytes
from horizonml.planner.problem import Problem
from horizonml.planner.tasks import TaskMaker


@dataclass(frozen=True)
class Traffic:
    """The bytes of a step; with local steps, of an average one."""

    boundaries: tuple[float, ...]  # between each stage and the next, both ways, whoever sends them
    sums: tuple[tuple[float, ...], ...]  # that each member of each stage sends so that the members agree
    ranks: dict[int, float]  # that each rank sends in all


def traffic(problem: Problem, plan: Plan) -> Traffic:
    """What travels in a step of a plan with a full batch."""
    sent = dict.fromkeys((rank for stage in plan.stages for rank in stage.ranks), 0.0)
    between = [0.0] * (len(plan.stages) - 1)
    for rank, tasks in TaskMaker(problem, plan, LayerTimes(problem.profiles)).tasks().items():
        for task in tasks:
            size = sum(each for peer, each in task.sends if peer != rank)
            if size:
                sent[rank] += size
                between[min(task.action.stage, task.receiver)] += size
    sums = tuple(tuple(summed_bytes(problem, plan, stage)) for stage in plan.stages)
    for stage, own in zip(plan.stages, sums, strict=True):
        for rank, size in zip(stage.ranks, own, strict=True):
            sent[rank] += size
    return Traffic(tuple(between), sums, sent)
