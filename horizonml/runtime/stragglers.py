"""Compares measured compute times with those that the plan predicted, and replans when that is worthwhile.

A device that overheats lowers its clock, and a device that gets other work to do is slower, too; both compute longer
than planned. Every few steps the ranks gather their medians, so that all of them know the same and decide alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from horizonml.comm.expected import optional
from horizonml.comm.group import Group
from horizonml.comm.tree import TreeSum
from horizonml.plan.plan import Plan
from horizonml.planner.evaluator import Candidate, Evaluator
from horizonml.planner.problem import Problem
from horizonml.planner.search import search

WINDOW = 8  # steps between two comparisons
_SETTLE = 3  # steps of a new plan that do not count, because caches and connections are set up in them
_WORTH = 0.1  # a new plan must promise to save this part of a step
_NEWS = 1.2  # a slowdown must change by this factor before a new plan is tried again
_LITTLE = 0.1  # of the busiest rank's computing; a smaller difference does not count


@dataclass(frozen=True)
class Forecast:
    """Holds what a plan is predicted to take, in seconds of a step: the step itself, and each rank's computing.

    `memory` holds the bytes that each rank needs besides what its process takes, or nothing if that is not known.
    """

    seconds: float
    computing: tuple[float, ...]
    memory: tuple[float, ...] = ()

    @classmethod
    def of(cls, candidate: Candidate) -> Forecast:
        """Return the forecast from the simulation of a plan."""
        found = candidate.prediction
        ranks = range(len(found.computing))
        return cls(found.seconds, tuple(found.computing[r] for r in ranks), tuple(found.memory[r] for r in ranks))

    def to_json(self) -> dict[str, Any]:
        """Return the forecast as a JSON object."""
        return {"seconds": self.seconds, "computing": list(self.computing), "memory": list(self.memory)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Forecast:
        """Return the forecast from which `to_json` made `value`."""
        return cls(float(value["seconds"]), tuple(map(float, value["computing"])), tuple(map(float, value["memory"])))


@dataclass(frozen=True)
class Slowdowns:
    """Tells how the ranks' computing compares with the plan."""

    slowdowns: tuple[float, ...]  # each rank's measured over planned computing, relative to the other ranks
    stragglers: tuple[int, ...]
    news: bool  # whether the stragglers differ from those of the previous comparison


def slowdowns(measured: Sequence[float], planned: Sequence[float]) -> tuple[float, ...]:
    """Return each rank's measured over planned computing, relative to the median of the ranks.

    If all ranks are slower than planned by the same factor, no other plan is needed, so the median counts as 1. Of an
    even number of ranks the lower median is used, because a straggler cannot be below it. A rank also counts as 1 if
    its difference is negligible beside the busiest rank's computing, as that of a rank with hardly any work.
    """
    pairs, most = list(zip(measured, planned, strict=True)), max(planned)
    usual = statistics.median_low([m / p for m, p in pairs if p >= _LITTLE * most])
    if not 0 < usual < math.inf or not all(math.isfinite(m) for m in measured):  # some rank has measured nonsense
        return (1.0,) * len(measured)
    little = _LITTLE * usual * most
    return tuple(m / p / usual if p > 0 and abs(m - p * usual) > little else 1.0 for m, p in pairs)


def _better(value: Any) -> tuple[Plan, Forecast]:
    """Return the plan that rank 0 has found."""
    return Plan.from_json(value["plan"]), Forecast.from_json(value["forecast"])


class StragglerDetector:
    """Finds ranks that compute longer than planned. All ranks must call `step` after every step."""

    def __init__(
        self, group: Group, plan: Plan, forecast: Forecast, problem: Problem | None, threshold: float, replan: bool
    ) -> None:
        """Prepare to compare steps with `forecast`; `problem` is what the plan was made for, on rank 0 only."""
        self._group, self._threshold, self._replan = group, threshold, replan
        tag = group.channel("stragglers").tag()
        self._sum = TreeSum(group, range(group.world_size), tag, torch.zeros(group.world_size, dtype=torch.float64))
        self._measured: list[float] = []
        self._stragglers: tuple[int, ...] = ()
        self._tried: tuple[float, ...] = (1.0,) * group.world_size
        self._adopt(plan, forecast, problem)

    def _adopt(self, plan: Plan, forecast: Forecast, problem: Problem | None) -> None:
        self.plan, self.forecast, self.problem = plan, forecast, problem
        self._wanted = _SETTLE + WINDOW
        self._measured = []

    def step(self, compute: float) -> Slowdowns | None:
        """Record this rank's seconds of computing in a step; every few steps, return what all ranks measured."""
        self._measured.append(compute)
        if len(self._measured) < self._wanted:
            return None
        vector = torch.zeros(self._group.world_size, dtype=torch.float64)
        vector[self._group.rank] = statistics.median(self._measured[-WINDOW:])
        self._measured, self._wanted = [], WINDOW
        self._medians = tuple(self._sum.sum(vector).tolist())
        found = slowdowns(self._medians, self.forecast.computing)
        stragglers = tuple(rank for rank, factor in enumerate(found) if factor > self._threshold)
        news = stragglers != self._stragglers
        self._stragglers = stragglers
        return Slowdowns(found, stragglers, news)

    def better_plan(self, found: Slowdowns) -> bool:
        """Return whether there is a plan that fits the measurements clearly better; if so, it becomes `plan`.

        Rank 0 searches with every device's profile scaled to the measurements. A device that is idle in the plan yields
        no new measurements.
        """
        off = max(max(factor, 1 / factor) if factor > 0 else 1.0 for factor in found.slowdowns)
        changed = any(
            max(new / old, old / new) > _NEWS for new, old in zip(found.slowdowns, self._tried, strict=True) if new > 0
        )
        if not self._replan or off <= self._threshold or not changed:
            return False
        self._tried = found.slowdowns
        answer: dict[str, Any] | None = None
        problem = self.problem
        if problem is not None:
            ratios = zip(problem.profiles, self._medians, self.forecast.computing, strict=True)
            scaled = [profile.scaled(m / p) if m > 0 and p > 0 else profile for profile, m, p in ratios]
            problem = replace(problem, profiles=scaled)
            evaluator = Evaluator(problem)
            other = search(problem, evaluator=evaluator)
            before = evaluator.judge(self.plan).prediction.seconds
            if other.usable and other.prediction.seconds < (1 - _WORTH) * before:
                answer = {"plan": other.plan.to_json(), "forecast": Forecast.of(other).to_json()}
        better = self._group.broadcast(answer, read=optional(_better))
        if better is None:
            return False
        plan, forecast = better
        self._adopt(plan, forecast, problem)
        self._tried, self._stragglers = (1.0,) * self._group.world_size, ()
        return True
