"""Predicts how the members of a stage agree on its gradients: what each way of summing costs, and which is fastest."""

from __future__ import annotations

from collections.abc import Sequence

from horizonml.plan.plan import SYNCS, Stage, Sync
from horizonml.planner.cost import coding_seconds, ring_seconds, slowest_link, synced_bytes
from horizonml.planner.problem import Problem


def syncs_of(problem: Problem) -> tuple[Sync, ...]:
    """Return the ways in which the members of a stage may sum, the most precise first."""
    return (problem.constraints.sync, *problem.constraints.syncs)


def fastest_sync(problem: Problem, start: int, stop: int, ranks: Sequence[int]) -> Sync:
    """Return the way in which `ranks` sum the gradients of layers `start` to `stop - 1` fastest."""
    syncs = syncs_of(problem)
    if len(ranks) == 1:
        return Sync.ALL_REDUCE
    if len(syncs) == 1:
        return syncs[0]
    slowest = slowest_link(problem, ranks)
    whole = synced_bytes(problem, Sync.ALL_REDUCE, start, stop)

    def seconds(sync: Sync) -> float:
        size = synced_bytes(problem, sync, start, stop)
        return ring_seconds(len(ranks), size, slowest) + coding_seconds(problem, sync, ranks, whole)

    return min(syncs, key=seconds)


def is_lossy(stage: Stage) -> bool:
    """Return whether the members of a stage agree in a way that is not exact."""
    return len(stage.ranks) > 1 and not SYNCS[stage.sync].exact
