"""Judges plans by their predicted steps, and improves them by small moves."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from horizonml.errors import PlanError
from horizonml.plan.plan import Plan, Stage
from horizonml.planner.cost import LayerTimes, fastest_format, fastest_sync, slowest_link, syncs_of
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
        self._totals: dict[tuple[int, float], tuple[float, ...]] = {}
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
        rows = {end - first for stage in plan.stages for size in sizes for first, end in stage.mean_rows(size)}
        return any(0 < round(own, 6) < least for own in rows)  # at times, it is the whole number below

    def slowest_link(self, ranks: tuple[int, ...]) -> MeasuredLink:
        """Return a link as slow as the slowest ones along a ring of ranks."""
        if ranks not in self._rings:
            self._rings[ranks] = slowest_link(self.problem, ranks)
        return self._rings[ranks]

    def totals(self, rank: int, rows: float) -> tuple[float, ...]:
        """Return the seconds of both passes of the first 0, 1, ... layers, given the rank's share of the cores."""
        if (rank, rows) not in self._totals:
            factor = self.problem.oversubscription[rank]
            pairs = zip(*self._cut_by.sums(rank, rows), strict=True)
            self._totals[rank, rows] = tuple(factor * (forward + backward) for forward, backward in pairs)
        return self._totals[rank, rows]

    def seconds(self, rank: int, start: int, stop: int, rows: float) -> float:
        """Return the seconds of both passes of layers `start` to `stop - 1`, given the rank's share of the cores."""
        if rows == 0:
            return 0.0
        totals = self.totals(rank, rows)
        return totals[stop] - totals[start]

    def slowest(self, stage: Stage, rows: int) -> float:
        """Return the seconds of both passes of the stage's slowest member, for a micro-batch of `rows` samples."""
        own, equal = [end - first for first, end in stage.mean_rows(rows)], rows / len(stage.ranks)
        if stage.sync.steps_alone:
            parts = zip(stage.ranks, own, strict=True)
            return max(self.seconds(rank, stage.start, stage.stop, equal) * part / equal for rank, part in parts)
        return max(self.seconds(rank, stage.start, stage.stop, n) for rank, n in zip(stage.ranks, own, strict=True))

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


# Of a step's time, the most that a preference may cost: for more precise formats and sums, an exact plan, steps that
# all ranks take together, the usual schedule, all devices, and a single one of them. With a larger one, a faster
# network would make plans slower.
PREFERENCE = 0.02
_FEW_RANKS = 16  # ranks, up to which every device may move anywhere
_MANY_RANKS = 200  # ranks, above which no device moves, because each simulation takes long
_LESS = (0.5, 0.8, 1.25, 2.0)  # factors by which a member's share is tried

Groups = list[list[int]]
_Make = Callable[[list[int], Groups, int], Plan]  # makes a plan from its cuts, groups and micro-batches


def improve(
    evaluator: Evaluator,
    found: Candidate,
    budget: int,
    moves: Callable[[Evaluator, Plan], Iterable[Plan]],
    judge: Callable[[Evaluator, Plan], Candidate | None] = Evaluator.judge,
    cost: Callable[[Candidate], Any] = lambda one: one.cost,
) -> Candidate:
    """Return the best plan that `moves` lead to, one after the other, until none helps or `budget` is spent.

    `judge` returns what becomes of a plan, or None if it cannot be used.
    """
    best, end = found, evaluator.evaluations + budget
    while True:
        before = best
        for plan in moves(evaluator, best.plan):
            if evaluator.evaluations >= end:
                return best
            best = min(best, judge(evaluator, plan) or best, key=cost)
        if best is before:
            return best


def small_moves(evaluator: Evaluator, plan: Plan) -> Iterator[Plan]:
    """Yield plans that differ a little from this one, among those that the constraints allow."""
    problem = evaluator.problem
    constraints = problem.constraints
    cuts, groups = [stage.start for stage in plan.stages[1:]], [list(stage.ranks) for stage in plan.stages]

    def make(cuts: list[int], groups: Groups, micro_batches: int) -> Plan:
        return evaluator.plan(cuts, groups, micro_batches, plan.schedule)

    place = _place(evaluator, plan)
    for near in (place - 1, place + 1, place + 2):
        if 0 <= near < len(problem.micro_batches):
            yield make(cuts, groups, problem.micro_batches[near])
    yield make(cuts, groups, plan.micro_batches)  # with the shares of this search
    if constraints.cuts is None:
        reach = 16 if problem.ranks <= _FEW_RANKS else 2
        for number, cut in enumerate(cuts):
            lowest, highest = [0, *cuts][number] + 1, [*cuts, problem.layers][number + 1] - 1
            for other in range(max(lowest, cut - reach), min(highest, cut + reach) + 1):
                if other != cut:
                    yield make([*cuts[:number], other, *cuts[number + 1 :]], groups, plan.micro_batches)
    one_stage_each = len(plan.lanes) == len(plan.stages)
    if constraints.cuts is None and not one_stage_each:
        yield from _slid(evaluator, plan, cuts, groups, make)
    if constraints.ordered or constraints.stages is not None or problem.ranks > _MANY_RANKS or not one_stage_each:
        return
    for changed in itertools.chain(
        _moved(evaluator, plan, cuts, groups, make),
        _exchanged(evaluator, plan, cuts, groups, make),
        _split(evaluator, plan, cuts, groups, make),
    ):
        number = len(changed.stages)
        fewest = constraints.fewest_stages(problem.ranks)
        if fewest <= number <= constraints.highest_stages(problem.ranks, problem.layers):
            yield changed


def _place(evaluator: Evaluator, plan: Plan) -> int:
    """Return the position of a plan's number of micro-batches among the allowed numbers."""
    counts = evaluator.problem.micro_batches
    return counts.index(plan.micro_batches) if plan.micro_batches in counts else 0


def _slid(evaluator: Evaluator, plan: Plan, cuts: list[int], groups: Groups, make: _Make) -> Iterator[Plan]:
    """Yield plans in which some consecutive stages keep their sizes, and only the stages around them change.

    One cut alone does not change the total work of a rank with several stages.
    """
    for first, end in itertools.combinations(range(len(cuts) + 1), 2):
        for by in (-2, -1, 1, 2):
            slid = [*cuts[:first], *(cut + by for cut in cuts[first:end]), *cuts[end:]]
            bounds = [0, *slid, evaluator.problem.layers]
            if end - first > 1 and all(a < b for a, b in itertools.pairwise(bounds)):
                yield make(slid, groups, plan.micro_batches)


def _moved(evaluator: Evaluator, plan: Plan, cuts: list[int], groups: Groups, make: _Make) -> Iterator[Plan]:
    """Yield plans in which one device belongs to another stage."""
    few = evaluator.problem.ranks <= _FEW_RANKS
    for source, target in itertools.permutations(range(len(groups)), 2):
        for rank in groups[source] if few else groups[source][:1] + groups[source][-1:]:
            others = [[r for r in group if r != rank] for group in groups]
            others[target] = [*others[target], rank]
            if others[source]:
                yield make(cuts, others, plan.micro_batches)
            else:  # its stage disappears, and the neighbour takes the layers
                gone = source if source < len(cuts) else source - 1
                left = [cut for index, cut in enumerate(cuts) if index != gone]
                yield make(left, [group for group in others if group], plan.micro_batches)


def _exchanged(evaluator: Evaluator, plan: Plan, cuts: list[int], groups: Groups, make: _Make) -> Iterator[Plan]:
    """Yield plans in which two stages, or two of their devices, are exchanged."""
    counts, place = evaluator.problem.micro_batches, _place(evaluator, plan)
    for one, other in itertools.combinations(range(len(groups)), 2):
        exchanged = list(groups)
        exchanged[one], exchanged[other] = groups[other], groups[one]
        for near in range(max(0, place - 2), min(len(counts), place + 3)):
            yield make(cuts, exchanged, counts[near])
        if evaluator.problem.ranks > _FEW_RANKS:
            continue
        for a, b in itertools.product(groups[one], groups[other]):
            swap = {a: b, b: a}
            yield make(cuts, [[swap.get(r, r) for r in group] for group in groups], plan.micro_batches)


def _split(evaluator: Evaluator, plan: Plan, cuts: list[int], groups: Groups, make: _Make) -> Iterator[Plan]:
    """Yield plans in which one device of a stage forms a new stage with some of its layers."""
    if evaluator.problem.ranks > _FEW_RANKS:
        return
    for number, group in enumerate(groups):
        start, stop = [0, *cuts][number], [*cuts, evaluator.problem.layers][number]
        for cut in range(start + 1, stop):
            for rank in group if len(group) > 1 else ():
                rest = [r for r in group if r != rank]
                for pair in ([rank], rest), (rest, [rank]):
                    between = [*groups[:number], *pair, *groups[number + 1 :]]
                    yield make([*cuts[:number], cut, *cuts[number:]], between, plan.micro_batches)


def other_shares(evaluator: Evaluator, plan: Plan) -> Iterator[Plan]:
    """Yield plans in which one member of a stage has a larger or a smaller share."""
    for number, stage in enumerate(plan.stages):
        for place in range(len(stage.ranks)) if len(stage.ranks) > 1 else ():
            for factor in _LESS:
                shares = tuple(share * (factor if own == place else 1) for own, share in enumerate(stage.shares))
                stages = list(plan.stages)
                stages[number] = replace(stage, shares=shares)
                yield replace(plan, stages=tuple(stages))


def more_precise(evaluator: Evaluator, found: Candidate) -> Candidate:
    """Return the same plan with more precise formats and sums wherever they cost next to nothing."""
    limit = found.prediction.seconds * (1 + PREFERENCE)
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
