"""Adds up what the ranks tell of their steps, for the records of rank 0: other ranks may record in other folders."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from horizonml.engine.step import Told

_SECONDS = 1.0  # between two records
_MOST = 1e15  # which what a rank tells stays below, unless it lies


class Others:
    """Holds what the ranks have told since the last record."""

    def __init__(self) -> None:
        self._sums: list[Told] = []
        self._since = time.monotonic()

    def add(self, told: Sequence[Told]) -> list[dict[str, Any] | None] | None:
        """Add what the ranks tell; from time to time, return the sums since the last time, by rank."""
        self._sums = [one.plus(more) for one, more in zip(self._sums or [Told()] * len(told), told, strict=True)]
        return self.rest() if time.monotonic() - self._since >= _SECONDS else None

    def rest(self) -> list[dict[str, Any] | None] | None:
        """Return the sums since the last time, by rank, or None if nobody has told anything.

        A rank is None that has told nothing, or nothing that can be.
        """
        found = [_described(one) for one in self._sums]
        self._sums, self._since = [], time.monotonic()
        return found if any(found) else None


def _described(sums: Told) -> dict[str, Any] | None:
    """Return a rank's sums as a JSON object, in few digits."""
    if not all(0 <= value < _MOST for value in sums) or sums.steps < 1 or sums.wall <= 0:
        return None
    names = ("wall", "compute", "transfer", "wait", "cpu_seconds")
    return {
        "steps": int(sums.steps),
        **{name: float(f"{getattr(sums, name):.6g}") for name in names},
        "rss_bytes": int(sums.rss_bytes),
        "links": {way: [int(sent), int(back)] for way, (sent, back) in sums.links.items() if sent or back},
    }
