"""Makes plans for a problem, judges them, and caches what it has computed."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from horizonml.errors import PlanError
from horizonml.plan.plan import Plan, Stage
from horizonml.planner.cost import LayerTimes, fastest_format, fastest_sync, slowest_link
from horizonml.planner.problem import Problem
from horizonml.planner.profile import MeasuredLink
from horizonml.planner.simulate import Prediction, predict

_NO_ROWS = 1e-9  # the share of a member without samples, small enough that it gets none
_MOST_REFINED = 64  # up to how many members shares are improved sample by sample


@dataclass(frozen=True)
class Candidate:
    """Pairs a plan with its predicted cost."""

    plan: Plan
    prediction: Prediction
    too_few_rows: bool = False  # a member would get some samples, but fewer than its layers can train on
    exact_seconds: float | None = None  # of a step of the best exact plan, where that was compared with this one
    fastest: Candidate | None = None  # the fastest plan, where this one was chosen for its energy
    everyone_seconds: float | None = None  # of a step of the best plan for all devices, where this leaves some out

    @property
    def cost(self) -> tuple[bool, float, float]:
        """Return a sort key: whether the plan cannot run, the largest lack of memory, and the seconds of a step."""
        return self.too_few_rows, max(self.prediction.lacking.values(), default=0.0), self.prediction.seconds

    @property
    def usable(self) -> bool:
        """Return whether ranks can train with this plan."""
        return self.prediction.fits and not self.too_few_rows


def judge(problem: Problem, plan: Plan) -> Candidate:
    """Return a plan with its predicted cost; an `Evaluator` is faster for many plans."""
    return Evaluator(problem).judge(plan)


class OutOfTime(PlanError):
    """The search for a plan took longer than it may."""


class Evaluator:
    """Makes and judges plans for one problem; `evaluations` counts the simulations."""

    def __init__(self, problem: Problem, deadline: float = math.inf) -> None:
        """Prepare for a problem, whose constraints decide on the shares and formats of the plans that are made.

        After the `deadline`, a time of `monotonic`, everything that takes time raises OutOfTime.
        """
        self.problem, self.evaluations, self.deadline = problem, 0, deadline
        self.times = LayerTimes(problem.profiles)
        one_profile = problem.constraints.one_profile
        self._cut_by = LayerTimes([problem.profiles[0]] * problem.ranks) if one_profile else self.times
        self._judged: dict[Plan, Candidate] = {}
        self._stages: dict[tuple[int, int, tuple[int, ...], int], Stage] = {}
        self._totals: dict[tuple[int, int], tuple[float, ...]] = {}
        self._rings: dict[tuple[int, ...], MeasuredLink] = {}

    def judge(self, plan: Plan) -> Candidate:
        """Return a plan with its predicted cost."""
        if plan not in self._judged:
            self.check_time()
            self.evaluations += 1
            prediction = predict(self.problem, plan, self.times, timeline=False)
            self._judged[plan] = Candidate(plan, prediction, self._too_few_rows(plan))
        return self._judged[plan]

    def check_time(self) -> None:
        """Raise OutOfTime after the deadline."""
        if time.monotonic() > self.deadline:
            raise OutOfTime("no plan was found in time")

    def _too_few_rows(self, plan: Plan) -> bool:
        problem = self.problem
        least = problem.profiles[0].least_rows
        if least == 1:
            return False
        batches = [batch for batch in (problem.batch_size, problem.last_batch) if batch]
        sizes = {size for batch in batches for size in plan.micro_sizes(batch, problem.batch_size)}
        return any(
            0 < end - first < least for stage in plan.stages for size in sizes for first, end in stage.rows(size)
        )

    def slowest_link(self, ranks: tuple[int, ...]) -> MeasuredLink:
        """Return a link as slow as the slowest ones along a ring of ranks."""
        if ranks not in self._rings:
            self._rings[ranks] = slowest_link(self.problem, ranks)
        return self._rings[ranks]

    def totals(self, rank: int, rows: int) -> tuple[float, ...]:
        """Return the seconds of both passes of the first 0, 1, ... layers, given the rank's share of the cores."""
        if (rank, rows) not in self._totals:
            factor = self.problem.oversubscription[rank]
            pairs = zip(*self._cut_by.sums(rank, rows), strict=True)
            self._totals[rank, rows] = tuple(factor * (forward + backward) for forward, backward in pairs)
        return self._totals[rank, rows]

    def seconds(self, rank: int, start: int, stop: int, rows: int) -> float:
        """Return the seconds of both passes of layers `start` to `stop - 1`, given the rank's share of the cores."""
        if rows == 0:
            return 0.0
        totals = self.totals(rank, rows)
        return totals[stop] - totals[start]

    def slowest(self, stage: Stage, rows: int) -> float:
        """Return the seconds of both passes of the stage's slowest member, for a micro-batch of `rows` samples."""
        members = zip(stage.ranks, stage.rows(rows), strict=True)
        return max(self.seconds(rank, stage.start, stage.stop, end - first) for rank, (first, end) in members)

    def stage(self, start: int, stop: int, ranks: Sequence[int], micro_batches: int) -> Stage:
        """Return a stage of `ranks`, in their order; free shares are chosen so that the members finish together."""
        key = (start, stop, tuple(ranks), -(-self.problem.batch_size // micro_batches))
        if key not in self._stages:
            self.check_time()
            ordered = self.problem.constraints.ordered
            shares = [1.0] * len(ranks) if ordered else self._share_out(start, stop, ranks, key[3])
            sync = fastest_sync(self.problem, start, stop, ranks)
            self._stages[key] = Stage(start, stop, tuple(ranks), tuple(shares), sync)
        return self._stages[key]

    def _share_out(self, start: int, stop: int, ranks: Sequence[int], rows: int) -> list[float]:
        """Return each rank's rows, first in proportion to its speed, then moved from the slowest while that helps."""
        if len(ranks) == 1:
            return [1.0]
        fair = max(1, rows // len(ranks))
        speeds = [fair / max(1e-12, self.seconds(rank, start, stop, fair)) for rank in ranks]
        total = sum(speeds)
        ends = [round(rows * done / total) for done in itertools.accumulate(speeds)]
        own = [end - begin for begin, end in itertools.pairwise([0, *ends])]
        if len(ranks) <= _MOST_REFINED:
            self._refine(start, stop, ranks, own)
        least = self.problem.profiles[0].least_rows
        for place, count in enumerate(own):
            if 0 < count < least:  # fewer than the least: none is better
                own[max(range(len(own)), key=own.__getitem__)] += count
                own[place] -= count
        return [float(count) if count else _NO_ROWS for count in own]

    def _refine(self, start: int, stop: int, ranks: Sequence[int], own: list[int]) -> None:
        """Move rows from the slowest rank to the one that would be fastest with one more, while that helps."""
        times = [self.seconds(rank, start, stop, count) for rank, count in zip(ranks, own, strict=True)]
        after = [self.seconds(rank, start, stop, count + 1) for rank, count in zip(ranks, own, strict=True)]
        for _ in range(4 * len(ranks)):
            slow = max(range(len(ranks)), key=times.__getitem__)
            fast = min((place for place in range(len(ranks)) if place != slow), key=after.__getitem__)
            if own[slow] == 0 or after[fast] >= times[slow]:
                break
            for place, change in ((slow, -1), (fast, 1)):
                own[place] += change
                times[place] = self.seconds(ranks[place], start, stop, own[place])
                after[place] = self.seconds(ranks[place], start, stop, own[place] + 1)

    def plan(
        self, cuts: Sequence[int], groups: Sequence[Sequence[int]], micro_batches: int, schedule: str | None = None
    ) -> Plan:
        """Return a plan whose stages begin at layer 0 and at the `cuts`, with the formats that take the least time.

        What the constraints fix of its stages stays. `schedule` defaults to the first one that is allowed.
        """
        bounds, constraints = [0, *cuts, self.problem.layers], self.problem.constraints
        stages = [
            self.stage(start, stop, group, micro_batches)
            for (start, stop), group in zip(itertools.pairwise(bounds), groups, strict=True)
        ]
        if constraints.stages is not None:
            stages = [
                replace(stage, shares=fixed.shares, sync=fixed.sync, send=fixed.send)
                for stage, fixed in zip(stages, constraints.stages, strict=True)
            ]
        else:
            for number, (stage, after) in enumerate(itertools.pairwise(stages)):
                stages[number] = replace(stage, send=fastest_format(self.problem, stage.ranks[0], after.ranks[0]))
        local = constraints.local if stages[0].sync.steps_alone else None
        return Plan(tuple(stages), schedule or constraints.schedules[0], micro_batches, local)
