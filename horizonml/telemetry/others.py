"""Adds up what the ranks on other machines tell of their steps, for the records of rank 0."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from horizonml.engine.step import Told

_SECONDS = 1.0  # between two records


class Others:
    """Holds what the ranks have told since the last record."""

    def __init__(self) -> None:
        self._sums: list[list[float]] = []
        self._cpu: list[float] = []  # of every rank, at the time of the last record
        self._since = time.monotonic()

    def add(self, told: Sequence[Told]) -> list[dict[str, Any] | None] | None:
        """Add what every rank tells of a step; from time to time, return the means since the last time, by rank.

        A rank that has told nothing is None.
        """
        if len(self._sums) != len(told):
            self._sums = [[0.0] * len(Told()) for _ in told]
        if len(self._cpu) != len(told):
            self._cpu = [one.cpu_seconds for one in told]
        for sums, one in zip(self._sums, told, strict=True):
            for place, number in enumerate(one):
                sums[place] += number
        if time.monotonic() - self._since < _SECONDS:
            return None
        found = [_mean(Told(*sums), one, before) for sums, one, before in zip(self._sums, told, self._cpu, strict=True)]
        self._sums, self._cpu, self._since = [], [one.cpu_seconds for one in told], time.monotonic()
        return found


def _mean(sums: Told, last: Told, cpu_before: float) -> dict[str, Any] | None:
    """Return a rank's shares of the time, the cores it used, its memory, and its bytes per second."""
    if sums.wall <= 0 or last.wall <= 0:
        return None
    return {
        "seconds": last.wall,
        "split": {kind: getattr(sums, kind) / sums.wall for kind in ("compute", "transfer", "wait")},
        "cores": max(0.0, last.cpu_seconds - cpu_before) / sums.wall if cpu_before else None,
        "rss_bytes": int(last.rss_bytes),
        "links": {way: [sent / sums.wall, received / sums.wall] for way, (sent, received) in sums.links.items()},
    }
