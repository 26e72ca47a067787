"""Predicts what travels in a step of a plan: between stages, among the members of stages, and from each rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from horizonml.plan.gradients import TREE_BYTES, TREE_BYTES_ON_ONE_HOST, tree_messages
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.planner.cost import LayerTimes, gradient_message_bytes, message_bytes, synced_bytes
from horizonml.planner.outer import outer_bytes
from horizonml.planner.problem import Problem
from horizonml.planner.tasks import TaskMaker


@dataclass(frozen=True)
class Traffic:
    """Holds the bytes of a step; with local steps, of an average one."""

    boundaries: tuple[float, ...]  # between each stage and the next, both ways, whoever sends them
    sums: tuple[tuple[float, ...], ...]  # that each member of each stage sends so that the members agree
    ranks: dict[int, float]  # that each rank sends in all


def traffic(problem: Problem, plan: Plan) -> Traffic:
    """Return what travels in a step of a plan with a full batch."""
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


def boundary_bytes(problem: Problem, stop: int, send: str) -> float:
    """Return the bytes that a sample takes in the format `send` across the cut before layer `stop`, both ways."""
    profile = problem.profiles[0]
    return message_bytes(profile, stop, send) + gradient_message_bytes(profile, stop, send)


def summed_bytes(problem: Problem, plan: Plan, stage: Stage) -> list[float]:
    """Return the bytes that each member of a stage sends in a step, on average, so that the members agree."""
    count = len(stage.ranks)
    if count == 1 or stage.splits_channels:
        return [0.0] * count
    if stage.sync is Sync.LOCAL:
        size = outer_bytes(problem, plan, stage)
    else:
        size = synced_bytes(problem, stage.sync, stage.start, stage.stop)
    here = {problem.host_of[rank] for rank in stage.ranks}
    tree = TREE_BYTES_ON_ONE_HOST if len(here) == 1 else TREE_BYTES
    if stage.sync is Sync.ALL_REDUCE and math.isfinite(size) and size <= tree:
        return [size * tree_messages(place, count) for place in range(count)]
    return [2 * (count - 1) / count * size] * count
