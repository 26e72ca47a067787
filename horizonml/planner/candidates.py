"""Proposes plans from which the search begins: simple ones, and those of the dynamic programme.

The dynamic programme runs for several orders of the devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.planner.evaluator import Evaluator
from horizonml.planner.problem import Problem
from horizonml.planner.programme import Programme

_MOST_BLOCKS = (48, 32)  # blocks of devices that the dynamic programme distinguishes, with some ranks and with many
_FEW_RANKS = 16  # ranks, up to which every number of micro-batches is tried
_MANY_RANKS = 100  # ranks, above which there are fewer blocks, and orders by speed and by links alone
_MOST_ORDERED = 2000  # ranks, above which only two orders are tried


def data_parallel(problem: Problem) -> Plan:
    """Return the plan in which every rank holds all layers, with equal shares."""
    ranks, constraints = tuple(range(problem.ranks)), problem.constraints
    sync = constraints.sync if problem.ranks > 1 else Sync.ALL_REDUCE
    stage = Stage(0, problem.layers, ranks, (1.0,) * problem.ranks, sync)
    return Plan((stage,), constraints.schedules[0], 1, constraints.local if sync.steps_alone else None)


def plain_ddp(problem: Problem) -> Plan:
    """Return plain data parallelism, with exact sums in every step, whatever the constraints say."""
    plan = data_parallel(problem)
    return replace(plan, stages=(replace(plan.stages[0], sync=Sync.ALL_REDUCE),), local=None)


def equal_split(problem: Problem, micro_batches: int) -> Plan | None:
    """Return the pipeline with as many layers for every rank, or None if there are more ranks than layers."""
    if problem.ranks > problem.layers:
        return None
    bounds = [problem.layers * rank // problem.ranks for rank in range(problem.ranks + 1)]
    stages = tuple(Stage(bounds[r], bounds[r + 1], (r,), (1.0,)) for r in range(problem.ranks))
    return Plan(stages, problem.constraints.schedules[0], micro_batches)


def simple(evaluator: Evaluator) -> Iterator[Plan]:
    """Yield plans that are good starting points whatever the devices, among those that the constraints allow."""
    problem = evaluator.problem
    constraints, ranks = problem.constraints, list(range(problem.ranks))
    if constraints.stages is not None:
        return
    if constraints.fewest_stages(problem.ranks) == 1:
        for micro_batches in problem.micro_batches[:1] + problem.micro_batches[3:4]:
            yield evaluator.plan([], [ranks], micro_batches)
        if problem.micro_batches[:1] == (1,):
            yield data_parallel(problem)
    if constraints.most_members == 1:
        splits = (equal_split(problem, micro_batches) for micro_batches in problem.micro_batches)
        for plan in splits:
            if plan is not None:  # made anew, in the formats that the job allows
                cuts, groups = [stage.start for stage in plan.stages[1:]], [list(stage.ranks) for stage in plan.stages]
                yield evaluator.plan(cuts, groups, plan.micro_batches)


def orders(evaluator: Evaluator) -> list[list[int]]:
    """Return orders of the devices, in which neighbours form stages, as in Asteroid (MobiCom 2024, sec. 4.3)."""
    problem = evaluator.problem
    ranks = list(range(problem.ranks))
    if problem.constraints.ordered:
        return [ranks]
    if problem.ranks <= 3:
        return [list(order) for order in itertools.permutations(ranks)]
    speed = {rank: evaluator.seconds(rank, 0, problem.layers, 8) for rank in ranks}
    link = {
        rank: max((problem.network.between(rank, other).bandwidth for other in ranks[:8] if other != rank), default=0.0)
        for rank in ranks
    }
    keys: list[Callable[[int], float]] = [lambda r: speed[r], lambda r: problem.memory[r], lambda r: link[r]]
    many = _MANY_RANKS < problem.ranks <= _MOST_ORDERED
    found = [ranks] if not many else []
    for key in keys if not many else (keys[0], keys[2]):
        found += [sorted(ranks, key=key), sorted(ranks, key=lambda r, key=key: -key(r))]  # type: ignore[misc]
    fast = sorted(ranks, key=lambda r: speed[r])
    if not many:
        found.append([*fast[::2], *fast[1::2][::-1]])  # the slow ones in the middle
    return [list(order) for order in dict.fromkeys(map(tuple, found))]


def _blocks(evaluator: Evaluator) -> Iterator[list[list[int]]]:
    """Yield orders of blocks of ranks, in which consecutive blocks form stages."""
    problem = evaluator.problem
    constraints = problem.constraints
    if constraints.stages is not None:
        yield [list(stage.ranks) for stage in constraints.stages]
        return
    for order in orders(evaluator)[: None if problem.ranks <= _MOST_ORDERED else 2]:
        alone = constraints.most_members == 1
        most = _MOST_BLOCKS[problem.ranks > _MANY_RANKS]
        parts = np.array_split(order, len(order) if alone else min(len(order), most))
        yield [[int(rank) for rank in part] for part in parts]


def candidates(evaluator: Evaluator) -> Iterator[Plan]:
    """Yield good plans, over all orders of the devices, numbers of micro-batches and several numbers of stages."""
    problem, programme = evaluator.problem, Programme(evaluator)
    cuts = problem.constraints.cuts
    counts = problem.micro_batches if problem.ranks <= _FEW_RANKS else problem.micro_batches[::3]
    for blocks in _blocks(evaluator):
        for micro_batches in counts:
            if cuts is not None:
                yield evaluator.plan(cuts, blocks, micro_batches)
                continue
            for own_cuts, ends in programme.splits(blocks, micro_batches):
                bounds = itertools.pairwise([0, *ends])
                groups = [[rank for block in blocks[first:end] for rank in block] for first, end in bounds]
                yield evaluator.plan(own_cuts, groups, micro_batches)
