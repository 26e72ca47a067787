"""Remembers by which factors the gradients of the latest steps were scaled.

Clipping multiplies all gradients of a step by one factor, on which all ranks agree after their sums. Whoever repeats a
step, or applies gradients that were left open, needs the factor of that step.
"""

from __future__ import annotations

from horizonml.errors import PeerLost

_MOST = 1 << 15  # steps; more than a log of messages reaches back


class Scales:
    """Holds the factors of the latest steps; without an entry for any step, gradients are not clipped."""

    def __init__(self) -> None:
        self._factors: dict[int, float] = {}  # in the order of the steps

    def note(self, step: int, factor: float) -> None:
        """Note the factor of a step, counted from 0, which replaces what is known of later steps."""
        while self._factors and next(reversed(self._factors)) >= step:
            self._factors.popitem()
        self._factors[step] = factor
        if len(self._factors) > _MOST:
            del self._factors[next(iter(self._factors))]

    def get(self, step: int) -> float | None:
        """Return the factor of a step, or None if it is not known."""
        return self._factors.get(step)

    def of(self, step: int) -> float:
        """Return the factor of a step. Raises PeerLost if it is not known."""
        factor = self._factors.get(step)
        if factor is None:
            raise PeerLost(f"nobody here knows how the gradients of step {step} were clipped")
        return factor
