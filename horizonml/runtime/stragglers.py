"""Compares measured compute times with those that the plan predicted, and replans when that is worthwhile.

A device that overheats lowers its clock, and a device that gets other work to do is slower, too; both compute longer
than planned. Every few seconds, or at once when a rank says that its device's condition has changed, the ranks gather
their medians, so that all of them know the same and decide alike. Where time decides, it is that of rank 0's clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from horizonml.comm.expected import AsJson, fields, instance, number, optional, plain, text
from horizonml.comm.group import Group, TreeSum
from horizonml.machine.accelerator import computing
from horizonml.machine.sensors import Condition, Slowdown
from horizonml.plan.plan import Plan
from horizonml.planner.choose import is_better, with_objective
from horizonml.planner.evaluator import Candidate, Evaluator
from horizonml.planner.problem import Constraints, Objective, Problem
from horizonml.profiling.watts import Pace
from horizonml.state.carry import holders, senders
from horizonml.text import printable

# The ranks compare after so many steps that take so many seconds together: short steps often enough for a stable
# median, and long ones often enough to have another plan within a minute.
WINDOWS = ((8, 1.0), (3, 8.0), (1, 20.0))
_SETTLE = (3, 5.0)  # steps of a new plan, or seconds, that do not count: caches and connections are set up in them
_LASTS = 4.0  # seconds for which ranks must differ from the plan, unless a rank says that its condition has changed
_HOLD, _LONGEST_HOLD = 10.0, 60.0  # seconds after a new plan until the next one; doubled by each one of late
_LATE = 600.0  # seconds for which a new plan counts as one of late, and for which what it saves is counted
_PAUSE = 2.0  # seconds that a move takes besides what is sent, until one was measured
_WORTH = 0.1  # a new plan must promise to save this part of a step
_NEWS = 1.2  # a slowdown must change by this factor before a new plan is tried again
_LATE_AFTER = 30.0  # seconds with a plan after which its pace tells whether the run ends in time
_LATE_AGAIN = 60.0  # seconds after a search for a plan that meets the deadline until the next; doubled if in vain
_BETWEEN = 10.0  # times as long as a search took pass until the next, so that searches take a tenth of the time at most
_ADVANCE = 5.0  # seconds of searching for which that time need not have passed yet
_QUIET, _LONGEST_QUIET = 10.0, 600.0  # seconds after a message about slow ranks until the next; doubled by each one
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


@dataclass(frozen=True)
class Decision:
    """Holds a plan, and its forecast if it was predicted, as rank 0 sends them to all ranks."""

    plan: Annotated[Plan, AsJson(Plan)]
    forecast: Forecast | None = None

    @classmethod
    def of(cls, candidate: Candidate) -> Decision:
        """Return the decision for a plan that was simulated."""
        return cls(candidate.plan, Forecast.of(candidate))


@dataclass(frozen=True)
class Slowdowns:
    """Tells how the ranks' computing compares with the plan."""

    slowdowns: tuple[float, ...]  # each rank's measured over planned computing, relative to the other ranks
    stragglers: tuple[int, ...]  # the ranks that have been slow for a while
    news: bool  # whether the user should hear of the stragglers, or of what holds a device back
    reasons: tuple[str, ...] = ()  # what holds each rank's device back, if there are news; empty for most
    told: bool = False  # whether a rank has said that its device's condition has changed
    now: float = 0.0  # seconds since the run began, by the clock of rank 0


def slowdowns(measured: Sequence[float], planned: Sequence[float], usual: float | None = None) -> tuple[float, ...]:
    """Return each rank's measured over planned computing, relative to the median of the ranks.

    If all ranks are slower than planned by the same factor, no other plan is needed, so the median counts as 1. Of an
    even number of ranks the lower median is used, because a straggler cannot be below it. A rank also counts as 1 if
    its difference is negligible beside the busiest rank's computing, as that of a rank with hardly any work. `usual` is
    what counts as 1 instead, if it is given.
    """
    pairs, most = list(zip(measured, planned, strict=True)), max(planned)
    if usual is None:
        usual = statistics.median_low([m / p for m, p in pairs if p >= _LITTLE * most])
    if not 0 < usual < math.inf or not all(math.isfinite(m) for m in measured):  # some rank has measured nonsense
        return (1.0,) * len(measured)
    little = _LITTLE * usual * most
    return tuple(m / p / usual if p > 0 and abs(m - p * usual) > little else 1.0 for m, p in pairs)


class Notices:
    """Decides when the user hears that ranks have become slow, or are slow no longer.

    A change must last, unless the device itself tells of it. A rank that is slow now and then must not fill the screen,
    so each message is followed by a longer silence than the one before.
    """

    def __init__(self, ranks: int) -> None:
        self.told = (False,) * ranks  # which ranks the user knows to be slow
        self._since: list[float | None] = [None] * ranks  # when each rank has become another than that
        self._quiet, self._last = _QUIET, -math.inf
        self._seen: float | None = None  # the update before, from when on what is measured now was so

    def update(self, now: float, slow: Sequence[bool], sure: Sequence[bool]) -> bool:
        """Return whether the user should hear of the ranks that are `slow` now; devices are `sure` of themselves."""
        told, began, self._seen = list(self.told), now if self._seen is None else self._seen, now
        for rank, is_slow in enumerate(slow):
            if is_slow == self.told[rank]:
                self._since[rank] = None
                continue
            before = self._since[rank]
            since = self._since[rank] = began if before is None else before
            if sure[rank] or now - since >= _LASTS:
                told[rank] = is_slow
        if tuple(told) == self.told or now < self._last + self._quiet:
            return False
        self._quiet = _QUIET if now - self._last > _LONGEST_QUIET else min(2 * self._quiet, _LONGEST_QUIET)
        self.told, self._last = tuple(told), now
        return True


class StragglerDetector:
    """Finds ranks that compute longer than planned, and better plans for them.

    All ranks must call `note` after every step, and `look` after those in which a rank found that it is `due`.
    """

    def __init__(
        self,
        group: Group,
        plan: Plan,
        forecast: Forecast,
        problem: Problem | None,
        threshold: float,
        replan: bool,
        condition: Condition | None = None,
        clock: Callable[[], float] = time.monotonic,
        allowed: Callable[[Constraints], Constraints] = lambda constraints: constraints,
        deadline: float | None = None,
        spent: float = 0.0,
    ) -> None:
        """Prepare to compare steps with `forecast`; `problem` is what the plan was made for, on rank 0 only.

        `condition` is that of this rank's device. `allowed` makes of the problem's constraints those of a new plan. Of
        the seconds in which the run is to end, its `deadline`, `spent` have passed.
        """
        self._group, self._threshold, self._replan = group, threshold, replan
        self._condition, self._clock, self._allowed = condition, clock, allowed
        self._deadline, self._born = deadline, clock() - spent
        self._late_at, self._late_again = -math.inf, _LATE_AGAIN
        self._search_seconds = 0.0  # what the last search took
        self._searches_paid = -math.inf  # when the pauses after all searches until now will have passed
        tag, ranks = group.channel("stragglers").tag(), group.world_size
        self._sum = TreeSum(group, range(ranks), tag, torch.zeros(4 * ranks + 1, dtype=torch.float64))
        paced = replan and ranks > 1 and not computing().accelerates  # a pace is that of the processor
        self._original, self._pace = problem, Pace() if paced else None
        self.factors = (1.0,) * ranks  # how many times as long as at first each rank takes, as the plan has it
        self._reasons = ("",) * ranks
        self._notices, self._held_back = Notices(ranks), (False,) * ranks
        self._pause, self._left = _PAUSE, math.nan
        self._moves: list[float] = []  # when new plans were made
        self._seen = 0.0  # the last comparison, in seconds since the run began
        self._adopt(plan, forecast, problem)

    def _adopt(self, plan: Plan, forecast: Forecast, problem: Problem | None) -> None:
        self.plan, self.forecast, self.problem = plan, forecast, problem
        self._notices.told = self._held_back  # by this plan nobody is known to be slow for another reason
        self._tried = self.factors
        self._off_since: float | None = None
        self._measured: list[float] = []
        self._first: float | None = None  # when the ranks have compared for the first time with this plan
        self._steps, self._wall = 0, math.nan  # since then, and the seconds of each, pauses included
        self._alone: float | None = None  # what a rank that works alone took at first, over what was planned
        self._settling, self._begun = _SETTLE[0], self._clock()
        self._settled_at = self._begun + _SETTLE[1]

    def due(self) -> bool:
        """Return whether this rank wants all to compare after the next step."""
        if self._group.world_size == 1:
            return False
        if self._condition is not None and self._condition.changed():
            return True
        steps, seconds = len(self._measured), self._clock() - self._begun
        return self._group.rank == 0 and any(steps >= least and seconds >= after for least, after in WINDOWS)

    def note(self, compute: float) -> None:
        """Record this rank's seconds of computing in a step."""
        now = self._clock()
        self._steps += 1
        if not math.isnan(self._left):  # this is the first step after a move
            self._pause, self._left = max(0.0, now - self._left - self.forecast.seconds), math.nan
        if self._settling:
            self._settling = self._settling - 1 if now < self._settled_at else 0
            self._begun = now
        else:
            self._measured.append(compute)
        if self._pace is not None and self._is_idle(self._group.rank) and self.factors[self._group.rank] > _NEWS:
            self._pace.sample()

    def look(self) -> Slowdowns:
        """Return what all ranks measured since the last comparison; all ranks call this after the same step."""
        group, ranks = self._group, self._group.world_size
        told = self._condition is not None and self._condition.changed()
        state = self._condition.tell(told) if self._condition is not None else Slowdown()
        vector = torch.zeros(4 * ranks + 1, dtype=torch.float64)
        own = vector[: 4 * ranks].view(4, ranks)[:, group.rank]
        own[0] = statistics.median(self._measured) if self._measured else 0.0
        own[1] = state.factor if state.factor > 1 or not state.reason else 0.0
        own[2] = (self._pace.factor() or 0.0) if self._pace is not None and self._is_idle(group.rank) else 0.0
        own[3] = float(told)
        vector[-1] = self._clock() - self._born if group.rank == 0 else 0.0
        self._measured, self._begun = [], self._clock()
        summed = self._sum.sum(vector)
        now = float(summed[-1])
        measured, factors, paces, news = (row.tolist() for row in summed[:-1].view(4, ranks))
        self._estimate(measured, factors, paces, news)
        planned = self.forecast.computing
        ratios = (found / before for found, before in zip(self._found, self.factors, strict=True))
        found = slowdowns([p * ratio for p, ratio in zip(planned, ratios, strict=True)], planned, self._alone)
        # Who is known to be slow has to become clearly faster before that is over.
        least = [1 + (self._threshold - 1) / (1 + known) for known in self._notices.told]
        slow = [factor > bound for factor, bound in zip(found, least, strict=True)]
        self._held_back = tuple(
            factor != 1 if new else before for factor, new, before in zip(factors, news, self._held_back, strict=True)
        )
        pairs = zip(slow, self._held_back, strict=True)
        changed = self._notices.update(now, [one or held for one, held in pairs], [flag > 0 for flag in news])
        told_of = zip(self._notices.told, slow, self._held_back, strict=True)
        stragglers = tuple(rank for rank, (is_told, one, held) in enumerate(told_of) if is_told and (one or not held))
        if changed or any(news):
            self._reasons = tuple(printable(one, 200) for one in group.gather_json(state.reason, text))
        if self._first is None:
            self._first, self._steps = now, 0
        elif now - self._first >= _LATE_AFTER:
            self._wall = (now - self._first) / max(1, self._steps)
        since, self._seen = self._seen or now, now
        if self._off(found) <= self._threshold:
            self._off_since = None
        elif self._off_since is None:
            self._off_since = since
        return Slowdowns(found, stragglers, changed, self._reasons, any(news), now)

    def _is_idle(self, rank: int) -> bool:
        """Return whether a rank has so little to do that its times tell nothing of its speed."""
        return self.forecast.computing[rank] < _LITTLE * max(self.forecast.computing)

    def _estimate(
        self, measured: Sequence[float], told: Sequence[float], paces: Sequence[float], news: Sequence[float]
    ) -> None:
        """Note how many times as long each rank takes for its work as at first, as `_found`."""
        ranks, planned = range(self._group.world_size), self.forecast.computing
        ratios = [
            m / p if p > 0 and 0 < m < math.inf and not self._is_idle(rank) else None
            for rank, m, p in zip(ranks, measured, planned, strict=True)
        ]
        known = [ratio for ratio in ratios if ratio is not None]
        if len(known) == 1 and len(ranks) > 1 and self._alone is None:
            self._alone = known[0]  # there is nobody to compare it with later but itself
        usual = statistics.median_low(known or [1.0]) if self._alone is None else self._alone
        found = []
        for rank, ratio in zip(ranks, ratios, strict=True):
            one = self.factors[rank] * (ratio if ratio is not None else usual)
            if ratio is None and paces[rank] > 0:
                one = paces[rank] * usual
            if news[rank] > 0 and told[rank] > 0:  # what was measured until now is of another condition
                one = max(1.0, told[rank]) * usual
            found.append(min(1e3, max(1e-3, one)) if math.isfinite(one) else self.factors[rank])
        self._found = tuple(found)

    def _off(self, found: Sequence[float]) -> float:
        """Return by which factor a rank differs most from the plan, whether it is slower or faster."""
        usual = statistics.median_low(one / old for one, old in zip(self._found, self.factors, strict=True))
        idle = [self._found[rank] / self.factors[rank] / usual for rank in range(len(found)) if self._is_idle(rank)]
        return max(max(factor, 1 / factor) if factor > 0 else 1.0 for factor in [*found, *idle])

    def better_plan(self, found: Slowdowns, steps: int) -> bool:
        """Return whether there is a plan that fits the measurements clearly better; if so, it becomes `plan`.

        Rank 0 searches with every device's profile scaled to the measurements. `steps` are left to do: a new plan must
        save more time in them, or in ten minutes, than the move takes. If the run would miss its deadline at its
        present pace, a plan is sought that meets it. All ranks wait while rank 0 searches. So where that takes long, it
        is done seldom, unless a device says that its condition has changed, and not for a run that is nearly over. How
        seldom is decided by a token bucket, in the form of the generic cell rate algorithm (ITU-T I.371).
        """
        late = self._is_late(found.now, steps)
        if not self._replan or (self._off_since is None and not late):
            return False
        if not (found.told or late) and found.now - (self._off_since or 0.0) < _LASTS:
            return False
        self._moves = [at for at in self._moves if found.now - at < _LATE]
        hold = min(_LONGEST_HOLD, _HOLD * 2 ** (len(self._moves) - 1)) if self._moves else 0.0
        if self._moves and found.now - self._moves[-1] < hold:
            return False
        if not (found.told or late) and self._searches_paid - found.now > _BETWEEN * _ADVANCE:
            return False
        if steps * self.forecast.seconds < self._search_seconds:
            return False
        pairs = zip(self._found, self._tried, strict=True)
        if not late and not any(max(new / old, old / new) > _NEWS for new, old in pairs):
            return False
        self._tried = self._found
        self._late_at = found.now if late else self._late_at
        began = self._clock()
        answer, problem = self._search(steps, found.now) if self._original is not None else (None, None)
        told = [plain(answer) if answer is not None else None, self._clock() - began]
        read = fields(optional(instance(Decision)), number)
        better, self._search_seconds = self._group.broadcast(told, read=read)
        self._searches_paid = max(self._searches_paid, found.now) + (1 + _BETWEEN) * self._search_seconds
        if better is None or better.forecast is None:
            self._late_again *= 2 if late else 1
            return False
        self._moves.append(found.now)
        self.factors = self._found
        if self._pace is not None:
            self._pace.forget()
        self._adopt(better.plan, better.forecast, problem)
        self._left = self._clock()
        return True

    def _is_late(self, now: float, steps: int) -> bool:
        """Return whether the run misses its deadline at the present pace, and no plan was sought for that of late."""
        if self._deadline is None or math.isnan(self._wall) or now - self._late_at < self._late_again:
            return False
        return self._wall * steps > self._deadline - now

    def _search(self, steps: int, now: float) -> tuple[Decision | None, Problem | None]:
        """Return the plan to go on with, or None, and the problem that it was made for."""
        original = self._original
        assert original is not None
        profiles = [one.scaled(factor) for one, factor in zip(original.profiles, self._found, strict=True)]
        problem = replace(original, profiles=profiles, constraints=self._allowed(original.constraints))
        evaluator = Evaluator(problem)
        timed = problem.objective.kind == "time"
        present = evaluator.judge(self.plan)
        before = present.prediction.seconds
        if self._deadline is not None:
            slower = self._wall / before if self._wall > 0 else 1.0  # than predicted, as the next plan will be, too
            left = Objective("deadline", deadline=max(0.0, self._deadline - now) / slower, steps=steps)
            problem = replace(problem, objective=left)
        other = with_objective(problem, evaluator)  # within the constraints, as exact as the first plan had to be
        saved = (before - other.prediction.seconds) * min(steps, _LATE / before)
        if other.plan.local is not None:  # replicas that step alone do not compare their steps
            return None, None
        if not is_better(problem, other, present, _WORTH) or (timed and saved <= self._cost(problem, other.plan)):
            return None, None
        return Decision.of(other), replace(problem, objective=original.objective)

    def _cost(self, problem: Problem, plan: Plan) -> float:
        """Return the seconds that a move to another plan is expected to take, one layer after the other."""
        seconds = self._pause
        for layer, sender, receiver in senders(holders(self.plan), plan):
            found = problem.profiles[receiver].layers[layer]
            size = found.parameter_bytes + found.trained * problem.optimizer_copies
            seconds += problem.network.between(sender, receiver).seconds(size)
        return seconds
