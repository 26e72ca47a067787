"""What the rendezvous service knows of each rank that waits or runs, sorted by what ranks have in common."""

from __future__ import annotations

from dataclasses import dataclass

from horizonml.rendezvous.fingerprint import Fingerprint, GroupKey


@dataclass
class Member:
    """A rank that waits, or is in the newest group."""

    fingerprint: Fingerprint
    joined: float
    moved: float  # when its heartbeat last moved
    beat: int = -1
    formed: bool = False
    beside: frozenset[int] = frozenset()  # the ranks of the group it runs in, as far as it said

    def silent(self, now: float) -> float:
        """Return for how many seconds its heartbeat has not moved."""
        return now - self.moved


Members = dict[int, Member]  # by the number of the join, in the order of their arrival


def waiting(members: Members) -> Members:
    """Return those who have not been taken into a group."""
    return {number: member for number, member in members.items() if not member.formed}


def formed(members: Members) -> Members:
    """Return those who are in the newest group and have not left it."""
    return {number: member for number, member in members.items() if member.formed}


def parties(members: Members) -> list[Members]:
    """Return those who wait, sorted by what they have in common: the most first, else the earliest."""
    found: dict[GroupKey, Members] = {}
    for number, member in waiting(members).items():
        found.setdefault(member.fingerprint.group_key, {})[number] = member
    return sorted(found.values(), key=len, reverse=True)


def ranks_of(members: Members) -> set[int]:
    """Return the ranks of some members."""
    return {member.fingerprint.rank for member in members.values()}


def duplicates(members: Members) -> list[tuple[int, int]]:
    """Return pairs of joins for the same rank: first the one that runs, or came first."""
    first: dict[int, int] = {}
    pairs = []
    for number in [*formed(members), *waiting(members)]:
        rank = members[number].fingerprint.rank
        if rank in first:
            pairs.append((first[rank], number))
        first.setdefault(rank, number)
    return pairs
