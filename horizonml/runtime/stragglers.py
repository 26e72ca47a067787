"""Compares what ranks measure with what their plan predicted, and makes a new plan when that is worth it.

A device that gets too hot lowers its clock, or gets other work to do: then it computes longer than planned. Every few
steps the ranks put their medians together, so that all of them know the same and decide alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from horizonml.comm.group import Group
from horizonml.comm.tree import TreeSum
from horizonml.plan.plan import Plan
from horizonml.planner.evaluator import Candidate, Evaluator
from horizonml.planner.problem import Problem
from horizonml.planner.search import search

WINDOW = 8  # steps between two comparisons
_SETTLE = 3  # steps of a new plan that do not count: they pay for caches and connections
_WORTH = 0.1  # a new plan must promise to save this part of a step
_NEWS = 1.2  # a slowdown has to change by this factor before a new plan is tried again
_LITTLE = 0.1  # of the busiest rank's computing: a smaller difference does not count


@dataclass(frozen=True)
class Forecast:
    """What a plan is predicted to take, in seconds of a step: the step, and each rank's computing."""

    seconds: float
    computing: tuple[float, ...]

    @classmethod
    def of(cls, candidate: Candidate) -> Forecast:
        """Return what the simulation of a plan predicted."""
        computing = candidate.prediction.computing
        return cls(candidate.prediction.seconds, tuple(computing[rank] for rank in range(len(computing))))

    def to_json(self) -> dict[str, Any]:
        """Return the forecast as plain JSON values."""
        return {"seconds": self.seconds, "computing": list(self.computing)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Forecast:
        """Return the forecast that `to_json` was asked for."""
        return cls(float(value["seconds"]), tuple(map(float, value["computing"])))


@dataclass(frozen=True)
class Slowdowns:
    """How the ranks' computing compares with the plan."""

    slowdowns: tuple[float, ...]  # each rank's computing over what was planned, compared with the others'
    stragglers: tuple[int, ...]
    news: bool  # whether the stragglers are not those of the comparison before


def slowdowns(measured: Sequence[float], planned: Sequence[float]) -> tuple[float, ...]:
    """Return the measured over the planned computing of each rank, compared with the ranks' median.

    All ranks being slower than planned by the same factor is no reason for another plan, so the median (of an even
    number of ranks the lower one, for a straggler cannot be below it) counts as 1. So does a rank whose difference is
    nothing beside the busiest rank's computing, as that of a rank with hardly any work.
    """
    pairs, most = list(zip(measured, planned, strict=True)), max(planned)
    usual = statistics.median_low([m / p for m, p in pairs if p >= _LITTLE * most])
    little = _LITTLE * usual * most
    return tuple(m / p / usual if p > 0 and abs(m - p * usual) > little else 1.0 for m, p in pairs)


class StragglerDetector:
    """Finds ranks that compute longer than planned. All ranks must call `step` after every step."""

    def __init__(
        self, group: Group, plan: Plan, forecast: Forecast, problem: Problem | None, threshold: float, replan: bool
    ) -> None:
        """`problem` is what the plan was made for, on rank 0; None elsewhere."""
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
        """Take note of a step's seconds of computing on this rank; return every few steps what all ranks found."""
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
        """Return whether there is a plan that fits what was found clearly better; then it becomes `plan`.

        Rank 0 searches, with every device's profile scaled to what was measured; of a device that the plan gives
        nothing to do, nothing new is known.
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
        answer = self._group.broadcast(answer)
        if answer is None:
            return False
        self._adopt(Plan.from_json(answer["plan"]), Forecast.from_json(answer["forecast"]), problem)
        self._tried, self._stragglers = (1.0,) * self._group.world_size, ()
        return True
