"""Searches for the fastest plan that the constraints allow: its layers, members, shares and micro-batches.

The dynamic programme proposes plans for several orders of the devices; the simulation judges the most promising; the
best are improved by small moves; finally, other schedules are tried on the plans found. Where fewer ranks may do better
than all, sets of them are searched; each accelerator of a machine counts as a machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from horizonml.errors import PlanError
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.plan.schedules import SCHEDULES
from horizonml.planner.cost import gradient_message_bytes, message_bytes, ring_seconds, synced_bytes
from horizonml.planner.evaluator import PREFERENCE, Candidate, Evaluator, improve, more_precise, small_moves
from horizonml.planner.problem import Constraints, FixedStage, Problem
from horizonml.planner.profile import Host
from horizonml.planner.programme import Programme

_MOST_MACHINES = 32  # up to which plans without some of them are tried
_MOST_TRIED = 8  # numbers of machines, for each order of them
_MOST_ALONE = 4  # ranks whose plans are compared to find the one that is fastest alone


def alone_on(problem: Problem, evaluator: Evaluator, rank: int) -> Candidate:
    """Return the fastest plan in which one rank does all the work, which is exact, and the others are spare."""
    schedule = problem.constraints.schedules[0]
    plans = (
        widened(Plan((Stage(0, problem.layers, (0,), (1.0,)),), schedule, number), (rank,), problem.ranks)
        for number in problem.micro_batches[:8]
    )
    return min((evaluator.judge(plan) for plan in plans), key=lambda one: one.cost)


def fastest_alone(problem: Problem, evaluator: Evaluator) -> Candidate:
    """Return the fastest of such plans, on the rank that suits it best."""
    ranks = sorted(range(problem.ranks), key=lambda rank: sum(evaluator.times.passes(rank, 0, problem.layers, 8)))
    roomy = max(range(problem.ranks), key=lambda rank: problem.memory[rank])
    tried = dict.fromkeys((*ranks[:_MOST_ALONE], roomy))
    return min((alone_on(problem, evaluator, rank) for rank in tried), key=lambda one: one.cost)


def on_fewer_ranks(problem: Problem) -> list[tuple[int, ...]]:
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


def without_slow_machines(evaluator: Evaluator, has_memory: bool) -> Iterator[list[tuple[int, ...]]]:
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


_FAR = 1.25  # of the best time: plans beyond this are not improved
_LAST = 2  # times the budget of a search, for moves from the best plan
_NEAR = 1.05  # of the best time: other schedules are tried on plans within this
_MOST_RESCHEDULED = 5  # the most plans that another schedule is tried on
_MANY_RANKS = 200  # ranks, above which fewer plans are simulated, because each takes long
_USUAL = "1f1b"  # the schedule with which plans are found for those that give several stages to a rank
_MOST_BLOCKS = (48, 32)  # blocks of devices that the dynamic programme distinguishes, with some ranks and with many
_FEW_RANKS = 16  # ranks, up to which every number of micro-batches is tried
_SOME_RANKS = 100  # ranks, above which there are fewer blocks, and orders by speed and by links alone
_MOST_ORDERED = 2000  # ranks, above which only two orders are tried


def search(problem: Problem, evaluations: int | None = None, evaluator: Evaluator | None = None) -> Candidate:
    """Return the best plan found within `evaluations` simulations (by default fewer, the more devices there are).

    `evaluator` is an existing evaluator for this problem, if any. If no plan fits into memory, the one that comes
    nearest is returned. Raises PlanError if the constraints allow no plan for the model.
    """
    evaluator = evaluator or Evaluator(problem)
    budget = evaluations or max(60 if problem.ranks <= _MANY_RANKS else 36, 900 // problem.ranks)
    first, *others = problem.constraints.schedules
    several = SCHEDULES[first].stages_per_rank > 1 and problem.constraints.stages is None
    if several:
        evaluator = Evaluator(
            replace(problem, constraints=replace(problem.constraints, schedules=(_USUAL,))), evaluator.deadline
        )
    starts = _starts(evaluator, budget)
    if not starts:
        raise PlanError("the constraints allow no plan of this model")
    most = 10 if problem.ranks <= 16 else 3 if problem.ranks <= 64 else 1
    improved = sorted(
        (improve(evaluator, one, budget // 3, small_moves) for one in _near(starts)[:most]), key=lambda one: one.cost
    )
    best = improved[0]
    if several:
        alone = (one.plan for one in improved if len(one.plan.stages) == 1)
        found = [evaluator.judge(replace(plan, schedule=first)) for plan in alone]
        other = _by_schedule(evaluator, improved, first, budget, math.inf)
        found += [other] if other is not None else []
        # Where the model has too few layers for more stages, each rank has one.
        best = min(found or [evaluator.judge(replace(best.plan, schedule=first))], key=lambda one: one.cost)
    limit = best.prediction.seconds * (1 - PREFERENCE)
    for schedule in others:
        other = _by_schedule(evaluator, improved, schedule, budget, _NEAR * best.prediction.seconds)
        if other is None or other.cost >= best.cost:
            continue
        if other.cost[:2] < best.cost[:2] or other.prediction.seconds <= limit:
            best = other
    return more_precise(evaluator, improve(evaluator, best, _LAST * budget, small_moves))


def _starts(evaluator: Evaluator, budget: int) -> list[Candidate]:
    """Return the plans that are worth improving: the best few for each number of stages, with different groups."""
    usual = set(simple(evaluator))
    ranked = sorted(set(candidates(evaluator)) | usual, key=lambda plan: _estimate(evaluator, plan))
    chosen = {*ranked[: max(8, budget // 3)], *(usual if evaluator.problem.constraints.ordered else ())}
    judged = sorted((evaluator.judge(plan) for plan in ranked if plan in chosen), key=lambda found: found.cost)
    starts: list[Candidate] = []
    for found in judged:
        groups = [[stage.ranks for stage in one.plan.stages] for one in starts]
        alike = [one for one in starts if len(one.plan.stages) == len(found.plan.stages)]
        if len(alike) < 3 and [stage.ranks for stage in found.plan.stages] not in groups:
            starts.append(found)
    return starts


def _near(starts: Sequence[Candidate]) -> list[Candidate]:
    """Return the plans that small moves may make the best one."""
    best = starts[0]
    if not best.usable:
        return list(starts)
    limit = _FAR * best.prediction.seconds
    return [one for one in starts if one.usable and one.prediction.seconds <= limit]


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
    many = _SOME_RANKS < problem.ranks <= _MOST_ORDERED
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
        most = _MOST_BLOCKS[problem.ranks > _SOME_RANKS]
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


def _estimate(evaluator: Evaluator, plan: Plan) -> float:
    """Return a plan's step time by a closed formula (Asteroid's dominant step), to select plans for simulation."""
    problem = evaluator.problem
    rows = -(-problem.batch_size // plan.micro_batches)
    times, after = [], 0.0
    for number, stage in enumerate(plan.stages):
        times.append(evaluator.slowest(stage, rows))
        if len(stage.ranks) > 1:
            size = synced_bytes(problem, stage.sync, stage.start, stage.stop)
            after = max(after, ring_seconds(len(stage.ranks), size, evaluator.slowest_link(stage.ranks)))
        if number + 1 < len(plan.stages):
            link = problem.network.between(stage.ranks[0], plan.stages[number + 1].ranks[0])
            profile, side_by_side = problem.profiles[0], min(len(stage.ranks), 4)
            ways = [message_bytes(profile, stage.stop, stage.send)]
            if profile.layers[stage.stop - 1].returns_gradients:
                ways.append(gradient_message_bytes(profile, stage.stop, stage.send))
            times.append(sum(link.seconds(rows * size / side_by_side) for size in ways))
    return (plan.micro_batches - 1) * max(times) + sum(times) + after


def _by_schedule(
    evaluator: Evaluator, found: Sequence[Candidate], schedule: str, budget: int, near: float
) -> Candidate | None:
    """Return the best plan with another schedule, made from the best `found`, or None if these have a single stage.

    It is improved only if it is predicted to take at most `near` seconds and to fit into memory.
    """
    pipelines = [one.plan for one in found if len(one.plan.stages) > 1][:_MOST_RESCHEDULED]
    plans = {plan for pipeline in pipelines for plan in _rescheduled(evaluator, pipeline, schedule)}
    ranked = sorted(plans, key=lambda plan: _estimate(evaluator, plan))
    judged = [evaluator.judge(plan) for plan in ranked[: max(4, budget // 8)]]
    if not judged:
        return None
    best = min(judged, key=lambda one: one.cost)
    worth_it = best.cost[:2] <= found[0].cost[:2] or near == math.inf
    if worth_it and best.prediction.seconds <= near:
        best = improve(evaluator, best, budget // 6, small_moves)
    return best


def _rescheduled(evaluator: Evaluator, plan: Plan, schedule: str) -> Iterator[Plan]:
    """Yield plans with the same groups of ranks and another schedule, which may give each group several stages."""
    problem = evaluator.problem
    turns = SCHEDULES[schedule].stages_per_rank
    if turns == 1 or problem.constraints.stages is not None:
        yield replace(plan, schedule=schedule)
        return
    stages = [plan.stages[number] for number in SCHEDULES[schedule].around(len(plan.stages))]
    groups = [stage.ranks for stage in stages]
    if len(groups) > problem.layers:
        return
    cyclic = Constraints(
        stages=tuple(FixedStage(s.ranks, s.shares, s.sync, s.send) for s in stages),
        formats=problem.constraints.formats,
        one_profile=problem.constraints.one_profile,
    )
    programme = Programme(Evaluator(replace(problem, constraints=cyclic), evaluator.deadline))
    places = [number for number in problem.micro_batches if plan.micro_batches / 2 <= number <= 2 * plan.micro_batches]
    for micro_batches in places:
        for cuts, _ in programme.splits(groups, micro_batches):
            yield evaluator.plan(cuts, groups, micro_batches, schedule)
