"""Searches for the plan that takes the least energy among those that are fast enough, and predicts energy.

Every device draws its idle watts while a step lasts, so fast plans save energy as well. What a plan for less energy can
do beyond that is to leave work to the devices that need the fewest joules for it. So the search is repeated with the
least efficient devices left out, more and more of them, and the best of these plans are improved by small moves.

The energy of a step is the idle watts of all devices while it lasts, and what working adds to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from horizonml.planner.evaluator import Candidate, Evaluator
from horizonml.planner.problem import Problem
from horizonml.planner.refine import improve, other_shares, small_moves
from horizonml.planner.simulate import Prediction
from horizonml.planner.subset import among, widened

_MOST_SETS = 8  # numbers of devices that are tried, for each order of them
_MOST_IMPROVED = 3  # sets of devices whose plans are improved
_MANY_RANKS = 200
_SOME_RANKS = 32  # ranks, above which fewer sets are tried
_POWERS = ((0.25, 0.5, 0.75), (0.5, 0.75))  # of the number of devices: the sizes of such sets, up to 200 and above
_AT_ONCE = 800  # the most simulations of an improvement, divided by the devices


Planned = Callable[[Problem, Evaluator, Sequence[int]], Candidate | None]  # the plan in which only some ranks work


def least_energy(
    problem: Problem, evaluator: Evaluator, limit: float, fastest: Candidate, planned: Planned
) -> Candidate:
    """Return the plan with the least energy that was found among those whose step takes at most `limit` seconds.

    At worst, that is the fastest one.
    """
    working = tuple(rank for rank in range(problem.ranks) if rank not in fastest.plan.spare)
    found = [(working, fastest)]
    found += [(kept, one) for kept in _sets(evaluator) if (one := planned(problem, evaluator, kept)) is not None]
    found.sort(key=lambda one: _key(problem, limit, one[1]))
    most = _MOST_IMPROVED if problem.ranks <= _SOME_RANKS else 1
    better = [_improved(problem, evaluator, limit, kept, one) for kept, one in found[:most]]
    return min([*(one for _, one in found), *better], key=lambda one: _key(problem, limit, one))


def _key(part: Problem, limit: float, one: Candidate, others: float = 0.0) -> tuple[bool, float, bool, float, float]:
    """Return a sort key of a plan for a part of the devices, while the `others` draw so many watts.

    It says whether the plan can be carried out, whether it is too slow, and its energy. Of plans that are too slow, the
    fastest comes first.
    """
    energy, seconds = energy_of(part, one.prediction), one.prediction.seconds
    assert energy is not None
    joules = energy.joules + others * seconds
    return *one.cost[:2], seconds > limit, seconds if seconds > limit else joules, joules


def _sets(evaluator: Evaluator) -> Iterable[tuple[int, ...]]:
    """Return sets of devices that may do all the work: the most efficient, or the fastest, of some number."""
    problem, ranks = evaluator.problem, evaluator.problem.ranks
    seconds = [evaluator.seconds(rank, 0, problem.layers, 8) for rank in range(ranks)]
    joules = [watts.added * own for watts, own in zip(problem.watts, seconds, strict=True) if watts is not None]
    sizes = sorted({max(1, round(ranks ** (place / _MOST_SETS))) for place in range(_MOST_SETS)} | {ranks - 1})
    if ranks > _SOME_RANKS:
        sizes = sorted({round(ranks**power) for power in _POWERS[ranks > _MANY_RANKS]})
    if ranks <= _MOST_SETS:
        sizes = list(range(1, ranks))
    orders = [sorted(range(ranks), key=cost.__getitem__) for cost in (joules, seconds)[: 1 + (ranks <= _SOME_RANKS)]]
    return dict.fromkeys(tuple(sorted(order[:size])) for order in orders for size in sizes if 0 < size < ranks)


def _improved(problem: Problem, whole: Evaluator, limit: float, kept: Sequence[int], one: Candidate) -> Candidate:
    """Return a plan for the same devices to which small moves, and then other shares, lead."""
    part, place = among(problem, kept), {rank: number for number, rank in enumerate(kept)}
    evaluator = Evaluator(part, whole.deadline)
    idle = sum(own.idle for rank, own in enumerate(problem.watts) if own is not None and rank not in place)
    stages = tuple(replace(stage, ranks=tuple(place[rank] for rank in stage.ranks)) for stage in one.plan.stages)
    best = evaluator.judge(replace(one.plan, stages=stages, spare=()))
    for moves in (small_moves, other_shares) if one.plan.local is None else ():
        budget = max(20, _AT_ONCE // len(kept))
        best = improve(evaluator, best, budget, moves, cost=lambda found: _key(part, limit, found, idle))
    judged = whole.judge(widened(best.plan, kept, problem.ranks))
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


def energy_facts(problem: Problem, found: Candidate) -> dict[str, object] | None:
    """Return a plan's energy as a JSON object, or None where the watts of a device are not known."""
    energy = energy_of(problem, found.prediction)
    if energy is None:
        return None
    facts: dict[str, object] = {
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
