"""Keeps what is known of the newest generation: whether it is over, who was lost, and who is expected to come back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from horizonml.rendezvous.answers import Ended, Lost

BACK_SECONDS = 3.0  # a member that has left to meet the others again is awaited for this long
STUCK_SECONDS = 30.0  # a member that lives but does not come back is awaited for this long
REPORT_SECONDS = 20.0  # members of a group that ran before the service report to it within this time


class NewestGeneration:
    """The newest generation as the service knows it. Times are seconds of any clock."""

    def __init__(self) -> None:
        self.number = 0
        self.here = False  # whether it was formed by this service, which then knows all its members
        self.ranks: frozenset[int] = frozenset()
        self.ended: Ended | None = None
        self.closed_at: float | None = None  # since when its members are to meet again
        self._back: dict[int, float] = {}  # ranks that are expected, and until when

    @property
    def closed(self) -> bool:
        """Return whether its members are to meet again."""
        return self.closed_at is not None

    def begin(self, number: int, ranks: Iterable[int], here: bool) -> None:
        """Let a generation be the newest one."""
        self.number, self.ranks, self.here = number, frozenset(ranks), here
        self.ended, self.closed_at, self._back = None, None, {}

    def add(self, ranks: Iterable[int]) -> None:
        """Take note of further ranks of a generation that was formed elsewhere."""
        self.ranks |= frozenset(ranks)

    def end(self, reason: str, lost: Iterable[Lost], now: float) -> Ended:
        """Declare it over, or add to whom it has lost."""
        if self.ended is None:
            self.ended = Ended(reason, tuple(lost))
        else:
            known = {one.rank for one in self.ended.lost}
            self.ended = replace(self.ended, lost=(*self.ended.lost, *(one for one in lost if one.rank not in known)))
        self.close(now)
        return self.ended

    def close(self, now: float) -> None:
        """Take note that its members meet again."""
        self.closed_at = now if self.closed_at is None else self.closed_at

    def expect(self, rank: int, until: float) -> None:
        """Expect a rank to come back until then."""
        self._back[rank] = until

    def came(self, rank: int) -> None:
        """Take note that a rank is here, or comes no more."""
        self._back.pop(rank, None)

    def expected(self, now: float) -> set[int]:
        """Return the ranks that have said that they come back, or whose report is awaited."""
        return {rank for rank, until in self._back.items() if now < until}

    def unreported(self, now: float) -> bool:
        """Return whether members that met at a service before this one have still to report to it."""
        return not self.here and not self.closed and bool(self.expected(now))

    def overdue(self, now: float) -> list[int]:
        """Return the ranks that have not come in time, once."""
        late = [rank for rank, until in self._back.items() if now >= until]
        for rank in late:
            del self._back[rank]
        return late
