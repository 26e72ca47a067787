"""Gives rank numbers to processes whose environment names none: the lowest that no living rank holds.

The number of a rank that was started with it, and is lost, comes last: whatever started that rank starts it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from horizonml.rendezvous.checks import MOST_RANKS, Fields, shown, whole
from horizonml.rendezvous.messages import Ask

RESERVE_SECONDS = 60.0  # in which a process that was given a number joins with it


@dataclass(frozen=True)
class Given:
    """A rank number that a process was given, and the world size of the run that it joins."""

    rank: int
    world_size: int


@dataclass
class Numbers:
    """Remembers which number was reserved for which process. Times are seconds of any clock."""

    _given: set[int] = field(default_factory=set)  # whose holders ask for a number again when they come back
    _reserved: dict[int, tuple[tuple[str, int], float]] = field(default_factory=dict)

    def give(
        self, ask: Ask, held: Mapping[int, tuple[str, int]], closed: Iterable[int], before: Iterable[int], now: float
    ) -> int | None:
        """Return a number for a process, or None if there is none left.

        `held` says which process holds a number; those in `closed` are not given for now. Who held one of those in
        `before` may come back.
        """
        process = ask.host_id, ask.pid
        self._reserved = {rank: entry for rank, entry in self._reserved.items() if now < entry[1]}
        taken = {rank for rank, holder in held.items() if holder != process}
        taken |= {rank for rank, (holder, _) in self._reserved.items() if holder != process}
        own = [rank for rank, (holder, _) in self._reserved.items() if holder == process and rank not in taken]
        own += [rank for rank, holder in held.items() if holder == process]
        free = set(range(ask.most)) - taken - set(closed)
        if not (free := set(own) & set(range(ask.most)) or free):
            return None
        others = set(before) - self._given
        rank = min(free - others or free)
        if rank not in others:
            self._given.add(rank)
        self._reserved[rank] = process, now + RESERVE_SECONDS
        return rank


def read_given(answer: Fields) -> Given | None:
    """Return the number that the service has given, None if it has none yet. Raises ValueError."""
    value = answer.get("number")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"a number must be an object, not {shown(value)}")
    return Given(whole(value, "rank", 0, MOST_RANKS - 1), whole(value, "world_size", 1, MOST_RANKS))
