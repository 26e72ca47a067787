"""Finds sets of ranks that may do better than all, and turns their plans into plans of all, in which others are spare.

Each accelerator of a machine counts as a machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from horizonml.plan.plan import Plan, Stage
from horizonml.planner.evaluator import Candidate, Evaluator
from horizonml.planner.problem import Problem
from horizonml.planner.profile import Host

_MOST_MACHINES = 32  # up to which plans without some of them are tried
_MOST_TRIED = 8  # numbers of machines, for each order of them
_MOST_ALONE = 4  # ranks whose plans are compared to find the one that is fastest alone


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
