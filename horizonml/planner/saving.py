"""Chooses the plan that takes the least energy among those that are fast enough, as the job's objective asks.

Every device draws its idle watts while a step lasts, so fast plans save energy as well. What a plan for less energy can
do beyond that is to leave work to the devices that need the fewest joules for it. So the search is repeated with the
least efficient devices left out, more and more of them, and the best of these plans are improved by small moves.

Predicts the energy of a step: the idle watts of all devices while it lasts, and what working adds to them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from horizonml.planner.evaluator import Candidate, Evaluator
from horizonml.planner.problem import Problem
from horizonml.planner.refine import improve, other_shares, small_moves
from horizonml.planner.simulate import Prediction
from horizonml.planner.subset import MANY_RANKS, among, fastest_plan, planned, widened

_MOST_SETS = 8  # numbers of devices that are tried, for each order of them
_MOST_IMPROVED = 3  # sets of devices whose plans are improved
_SOME_RANKS = 32  # ranks, above which fewer sets are tried
_POWERS = ((0.25, 0.5, 0.75), (0.5, 0.75))  # of the number of devices: the sizes of such sets, up to 200 and above
_AT_ONCE = 800  # the most simulations of an improvement, divided by the devices
_ROUNDING = 1 + 1e-9

_Key = tuple[bool, float, bool, float, float]


def with_objective(problem: Problem, evaluator: Evaluator | None = None) -> Candidate:
    """Return the best plan that was found for the problem's objective. Raises PlanError if there is none.

    Where it is not the fastest one, that is its `fastest`. If no plan meets a deadline, it is the fastest.
    """
    with _uncollected():
        return _with_objective(problem, evaluator or Evaluator(problem))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Put off collections of cyclic garbage: a search makes none, and would spend nearly half of its time on them."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _with_objective(problem: Problem, evaluator: Evaluator) -> Candidate:
    fastest = fastest_plan(problem, evaluator)
    known = len([watts for watts in problem.watts if watts is not None]) == problem.ranks
    if problem.objective.kind == "time" or not known or problem.constraints.ordered or problem.constraints.stages:
        return fastest
    limit = problem.objective.limit(fastest.prediction.seconds) * _ROUNDING
    if not fastest.usable:
        return replace(fastest, fastest=fastest)
    found = _Saving(problem, evaluator, limit).search(fastest)
    return replace(found, fastest=fastest)


def is_better(problem: Problem, one: Candidate, present: Candidate, part: float) -> bool:
    """Return whether a plan saves so large a part of what the problem's objective asks to save.

    A plan that is too slow for the objective is better replaced by any that is not.
    """
    if not one.usable:
        return False
    now, then = (energy_of(problem, found.prediction) for found in (present, one))
    seconds, before = one.prediction.seconds, present.prediction.seconds
    if problem.objective.kind == "time" or now is None or then is None:
        return seconds < (1 - part) * before
    limit = problem.objective.limit((one.fastest or one).prediction.seconds)
    if before > (1 + part) * limit:
        return seconds < (1 - part) * before
    return then.joules < (1 - part) * now.joules


class _Saving:
    """Searches for the plan with the least energy for one problem."""

    def __init__(self, problem: Problem, evaluator: Evaluator, limit: float) -> None:
        self._problem, self._evaluator, self._limit = problem, evaluator, limit

    def search(self, fastest: Candidate) -> Candidate:
        """Return the plan with the least energy that was found; at worst, that is the fastest one."""
        working = tuple(rank for rank in range(self._problem.ranks) if rank not in set(fastest.plan.spare))
        found: list[tuple[_Key, tuple[int, ...], Candidate]] = [(self._key(fastest), working, fastest)]
        for kept in self._sets():
            one = planned(self._problem, self._evaluator, kept)
            if one is not None:
                found.append((self._key(one), kept, one))
        found.sort(key=lambda one: one[0])
        better = [
            self._improved(kept, one)
            for _, kept, one in found[: _MOST_IMPROVED if self._problem.ranks <= _SOME_RANKS else 1]
        ]
        return min([*(one for _, _, one in found), *better], key=self._key)

    def _key(self, one: Candidate) -> _Key:
        """Return a sort key: whether a plan can be carried out, whether it is too slow, and its energy.

        Of plans that are too slow, the fastest comes first.
        """
        return self._key_among(self._problem, one)

    def _key_among(self, part: Problem, one: Candidate, others: float = 0.0) -> _Key:
        """Return the key of a plan for a part of the devices, while the `others` draw so many watts."""
        energy = energy_of(part, one.prediction)
        assert energy is not None
        seconds = one.prediction.seconds
        joules = energy.joules + others * seconds
        return (*one.cost[:2], seconds > self._limit, seconds if seconds > self._limit else joules, joules)

    def _sets(self) -> Iterator[tuple[int, ...]]:
        """Yield sets of devices that may do all the work: the most efficient, or the fastest, of some number."""
        problem, ranks = self._problem, self._problem.ranks
        seconds = [self._evaluator.seconds(rank, 0, problem.layers, 8) for rank in range(ranks)]
        joules = [watts.added * own for watts, own in zip(problem.watts, seconds, strict=True) if watts is not None]
        sizes = sorted({max(1, round(ranks ** (place / _MOST_SETS))) for place in range(_MOST_SETS)} | {ranks - 1})
        if ranks > _SOME_RANKS:
            sizes = sorted({round(ranks**power) for power in _POWERS[ranks > MANY_RANKS]})
        if ranks <= _MOST_SETS:
            sizes = list(range(1, ranks))
        found: dict[tuple[int, ...], None] = {}
        for cost in (joules, seconds) if ranks <= _SOME_RANKS else (joules,):
            order = sorted(range(ranks), key=cost.__getitem__)
            found |= {tuple(sorted(order[:size])): None for size in sizes if 0 < size < ranks}
        yield from found

    def _improved(self, kept: Sequence[int], one: Candidate) -> Candidate:
        """Return a plan for the same devices to which small moves, and then other shares, lead."""
        budget, ranks = max(20, _AT_ONCE // len(kept)), self._problem.ranks
        part = among(self._problem, kept)
        evaluator = Evaluator(part, self._evaluator.deadline)

        idle = [watts.idle for rank, watts in enumerate(self._problem.watts) if watts is not None and rank not in kept]

        def key(found: Candidate) -> _Key:
            return self._key_among(part, found, sum(idle))

        place = {rank: number for number, rank in enumerate(kept)}
        stages = [replace(s, ranks=tuple(place[rank] for rank in s.ranks)) for s in one.plan.stages]
        start = evaluator.judge(replace(one.plan, stages=tuple(stages), spare=()))
        best = start
        for moves in (small_moves, other_shares) if one.plan.local is None else ():
            best = improve(evaluator, best, budget, moves, cost=key)
        judged = self._evaluator.judge(widened(best.plan, kept, ranks))
        return replace(judged, exact_seconds=one.exact_seconds)


@dataclass(frozen=True)
class Energy:
    """Holds the joules of a step by rank; of these, `working` are for computing and transfers."""

    by_rank: tuple[float, ...]
    working: float

    @property
    def joules(self) -> float:
        """Return the joules of all devices together."""
        return sum(self.by_rank)


def energy_of(problem: Problem, prediction: Prediction) -> Energy | None:
    """Return the energy of a step, or None if the watts of a device are not known.

    A device that is left out, or that waits, draws its idle watts. While it computes, sends or receives, it draws its
    busy watts.
    """
    known = [watts for watts in problem.watts if watts is not None]
    if len(known) != problem.ranks:
        return None
    added = [watts.added * prediction.working[rank] for rank, watts in enumerate(known)]
    idle = [watts.idle * prediction.seconds for watts in known]
    return Energy(tuple(a + b for a, b in zip(idle, added, strict=True)), sum(added))


def energy_facts(problem: Problem, found: Candidate) -> dict[str, Any] | None:
    """Return a plan's energy as a JSON object, or None where the watts of a device are not known."""
    energy = energy_of(problem, found.prediction)
    if energy is None:
        return None
    facts: dict[str, Any] = {
        "objective": problem.objective.kind,
        "joules_per_step": energy.joules,
        "joules_per_sample": energy.joules / problem.batch_size,
        "watts": energy.joules / found.prediction.seconds,
        "joules_by_rank": list(energy.by_rank),
        "left_out": list(found.plan.spare),
    }
    if found.fastest is not None:
        fastest = energy_of(problem, found.fastest.prediction)
        assert fastest is not None
        facts["fastest"] = {"seconds": found.fastest.prediction.seconds, "joules_per_step": fastest.joules}
    return facts
