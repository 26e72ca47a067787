"""Predicts the energy of a step: the idle watts of all devices while it lasts, and what working adds to them."""

from __future__ import annotations

from dataclasses import dataclass

from horizonml.planner.problem import Problem
from horizonml.planner.simulate import Prediction


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
