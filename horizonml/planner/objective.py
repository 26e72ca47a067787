"""Describes what a plan is made for: the least time, the least energy, or the least energy that meets a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horizonml.errors import PlanError

MOST_WATTS = 1e5
FOR_STEPS = 0.9  # of a deadline; the rest is for evaluations, checkpoints and the start, which are not predicted


@dataclass(frozen=True)
class Watts:
    """Says what a rank's device draws while it waits, and while it computes or transfers."""

    idle: float
    busy: float

    @property
    def added(self) -> float:
        """Return what working adds to what the device draws anyway."""
        return max(0.0, self.busy - self.idle)

    def to_json(self) -> list[float]:
        """Return the watts as a JSON array."""
        return [self.idle, self.busy]

    @classmethod
    def from_json(cls, value: Any) -> Watts:
        """Return the watts from which `to_json` made `value`. Raises ValueError or TypeError if nothing made it."""
        idle, busy = value
        if not all(type(one) in (int, float) for one in (idle, busy)) or not 0 <= idle <= busy <= MOST_WATTS:
            raise ValueError(f"{str(value)[:60]} are not the watts of a device")
        return cls(float(idle), float(busy))


@dataclass(frozen=True)
class Objective:
    """Says by what a plan is chosen among those that can be carried out."""

    kind: str = "time"  # or "energy", or "deadline"
    slowdown: float = 2.0  # with "energy", a step takes at most so many times as long as the fastest plan's
    deadline: float | None = None  # with "deadline", the seconds in which a run of so many `steps` is to end
    steps: int = 0

    def limit(self, fastest: float) -> float:
        """Return how long a step may take if that of the fastest plan takes `fastest` seconds."""
        if self.kind == "deadline" and self.deadline is not None:
            return FOR_STEPS * self.deadline / max(1, self.steps)
        return self.slowdown * fastest if self.kind == "energy" else fastest


FASTEST = Objective()


def check_watts(objective: Objective, watts: Sequence[Watts | None], names: Sequence[str]) -> None:
    """Raise PlanError if the objective needs the watts of a device that neither measures nor states them."""
    unknown = [name for rank, name in enumerate(names) if rank >= len(watts) or watts[rank] is None]
    if objective.kind == "time" or not unknown:
        return
    several = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    raise PlanError(
        f"parallel.objective: {objective.kind} needs the watts of every device, and those of {unknown[0]}{several} are "
        "not known: nothing there measures them. State them: in a file of devices as `watts: {idle: 2.5, busy: 6}`, "
        "for a rank as HORIZONML_WATTS=2.5/6 in its environment. Or set parallel.objective: time"
    )
