"""Ranks that come to a roster, and what becomes of them, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from horizonml.rendezvous.members import Formed, Refused
from horizonml.rendezvous.messages import Departure, Ended, Farewell, Fingerprint, Lost
from horizonml.rendezvous.roster import Roster


def rank(number: int, world_size: int = 3, **changes: object) -> Fingerprint:
    base = Fingerprint(
        number, world_size, "digits", "d1", "0.1.0", "2.13.0", f"host{number}", f"m{number}", f"10.0.0.{number}", 100
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def gather(roster: Roster, *fingerprints: Fingerprint, at: float = 0.0, first: int = 1) -> list[Formed | Refused]:
    for number, fingerprint in enumerate(fingerprints, start=first):
        roster.join(number, fingerprint, at)
    return roster.decide(at)


def beat(roster: Roster, *joins: int, count: int, at: float) -> None:
    for number in joins:
        roster.beat(number, count, at)


def formed(roster: Roster, *fingerprints: Fingerprint, at: float = 0.0, first: int = 1) -> Formed:
    """Ranks that make a group at once."""
    (verdict,) = gather(roster, *fingerprints, at=at, first=first)
    assert isinstance(verdict, Formed)
    return verdict


def survivor(number: int, generation: int = 1, size: int = 3, **changes: object) -> Fingerprint:
    """A rank that was in a group before, and waits 10 s for those that the group has lost."""
    return rank(number, generation=generation, group_size=size, replace_timeout=10.0, **changes)


def alive(roster: Roster, *joins: int, start: float, end: float) -> list[Formed | Refused]:
    """The verdicts while these ranks beat each quarter of a second and all others are silent."""
    verdicts: list[Formed | Refused] = []
    for quarter in range(round(4 * start), round(4 * end) + 1):
        beat(roster, *joins, count=quarter, at=quarter / 4)
        verdicts += roster.decide(quarter / 4)
    return verdicts


def come_back(
    roster: Roster, *ranks: int, generation: int, size: int, at: float, first: int, **changes: object
) -> None:
    """Survivors of a group join anew."""
    for number, one in enumerate(ranks, start=first):
        roster.join(number, rank(one, generation=generation, group_size=size, **changes), at)


LOST_PEER = Farewell("lost a peer", Departure.LOST_PEER)


def roster_over(lost: int) -> Ended:
    """The end of the first generation, to which all but one rank came back after 6 s."""
    reason = "rank 0 on host0 has left the group and joins anew"
    return Ended(reason, (Lost(lost, f"host{lost}", "gives no sign of life", 6.0),))


def long_after(roster: Roster, *joins: int, start: int) -> list[Formed | Refused]:
    """The verdicts of the next minute, in which these ranks live and all others are silent."""
    verdicts = []
    for second in range(start, start + 60):
        beat(roster, *joins, count=second, at=second)
        verdicts += roster.decide(second)
    return verdicts


class Silent:
    """Is told what a rank waits for."""

    def say_waiting(self, text: str) -> None:
        pass

    def waiting(self, ranks: Sequence[int], first: bool = False) -> None:
        pass
