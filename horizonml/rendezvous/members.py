"""Sorts the ranks that wait or run by what they have in common, and decides when those that wait may form a group.

Until then it says in words what they wait for. Of the newest generation it keeps whether it is over, who was lost, and
who is expected to come back. Ranks that come too late are told that their job is complete, so that they do not wait for
ranks that come no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from horizonml.rendezvous.messages import Ended, Fingerprint, GroupKey, Lost


@dataclass(frozen=True)
class Formed:
    """The verdict on a complete group: its generation, and its joins and members in the order of ranks."""

    generation: int
    joins: list[int]
    members: list[Fingerprint]


@dataclass(frozen=True)
class Refused:
    """The verdict on joins that were refused, and why."""

    joins: list[int]
    reason: str
    replaced: bool = False  # another job has replaced theirs


@dataclass(frozen=True)
class Complete:
    """The verdict on joins that come when the others have trained the job to the end."""

    joins: list[int]


@dataclass
class Member:
    """A rank that waits, or is in the newest group."""

    fingerprint: Fingerprint
    joined: float
    moved: float  # when its heartbeat last moved
    beat: int = -1
    formed: bool = False
    dead: frozenset[int] = frozenset()  # ranks of the last group that had connected, whose processes are gone
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


_REMEMBER_SECONDS = 300.0  # processes that have been on their way for longer than this are taken for a new attempt


class Completion:
    """Knows the job that was completed last. Times are seconds of any clock."""

    def __init__(self, members: Members) -> None:
        """Judge these members, and take those out that come too late."""
        self._members = members
        self._job: tuple[str, str] | None = None
        self._at = 0.0

    def note(self, fingerprint: Fingerprint, now: float) -> None:
        """Take note that a rank has trained its job to the end; the others have, too, or are about to say so."""
        self._job, self._at = (fingerprint.job, fingerprint.digest), now

    def forget(self) -> None:
        """Take note that a new group begins."""
        self._job = None

    def of_latecomers(self, now: float) -> list[Complete]:
        """Return the verdict on those who wait for the job that is complete.

        A process that started before the job ended wanted to take part in it. One that started later belongs to a new
        attempt, even if the job is the same one.
        """
        if self._job is None or now - self._at > _REMEMBER_SECONDS:
            return []
        late = [
            number
            for number, member in waiting(self._members).items()
            if (member.fingerprint.job, member.fingerprint.digest) == self._job
            and member.joined - member.fingerprint.up < self._at
        ]
        for number in late:
            del self._members[number]
        return [Complete(late)] if late else []


_LEFT_ALONE_SECONDS = 60.0  # those who come where a group was lost begin with fewer only then: it may be cut off
ABSENT_SECONDS = 0.75  # three heartbeats: who has sent none for so long is not awaited once the others are back
_MAJORITY_SECONDS = 4.0  # after its last join, the majority of a group that an earlier service formed goes on


def awaited(members: Members, newest: NewestGeneration, now: float) -> set[int]:
    """Return the members of the newest generation that live and have not come back yet."""
    closed_at = newest.closed_at
    patient = closed_at is None or now - closed_at < STUCK_SECONDS
    there = formed(members).values()
    alive = {member.fingerprint.rank for member in there if member.silent(now) < ABSENT_SECONDS and patient}
    return alive | newest.expected(now)


def short_of(party: Members, members: Members, newest: NewestGeneration, settled: float, now: float) -> str | None:
    """Return why a party may not form a group yet, in words, or None if it may."""
    present = ranks_of(party)
    if absent := awaited(members, newest, now) - present - _certainly_dead(party):
        return f"waiting for rank {_listed(absent)} to meet the others again"
    last = max(member.fingerprint.generation for member in party.values())
    if last == 0:
        return _short_of_first(party, settled, newest.number > 0, now)
    return _short_of_next(party, last, newest, now)


def _short_of_first(party: Members, settled: float, left_alone: bool, now: float) -> str | None:
    one, count = next(iter(party.values())).fingerprint, len(party)
    if count < one.world_size:
        absent = sorted(set(range(one.world_size)) - ranks_of(party))[: one.world_size - count]
        words = f"waiting for rank {_listed(absent)} to join"
        # In an elastic run only ranks that have a checkpoint begin with fewer.
        one = next((m.fingerprint for m in party.values() if m.fingerprint.begin_with), one)
        if not 0 < one.begin_with <= count:
            return words
        after = max(one.begin_after, _LEFT_ALONE_SECONDS) if left_alone else one.begin_after
        left = after - (now - max(member.joined for member in party.values()))
        if left > 0:
            return f"{words}, for {left:.0f} s at most (parallel.min_workers)"
    return None if now >= settled else "waiting for a group that may run here already"


def _short_of_next(party: Members, last: int, newest: NewestGeneration, now: float) -> str | None:
    """Return why the survivors of a generation may not go on yet, with whoever has joined them."""
    survivors = {n: member for n, member in party.items() if member.fingerprint.generation == last}
    one = next(iter(survivors.values())).fingerprint
    known = last == newest.number
    gone = (newest.ranks if known else frozenset(range(one.world_size))) - ranks_of(party)
    if len(party) < one.min_world_size:
        return (
            f"{len(party)} of the {one.min_world_size} ranks that the job needs are here "
            f"(parallel.min_workers); waiting for rank {_listed(gone)} to join"
        )
    seen = known and newest.here
    # Other processes may have the numbers of ranks that are cut off, so at a standby this proves nothing.
    whole = ranks_of(party).issuperset(range(one.world_size)) and len(party) >= one.trained_size and not newest.standby
    if whole and not seen:
        return None
    dead = _certainly_dead(party)
    if not (whole or _is_enough(party, dead, newest)):
        return f"fewer than half of the group before are here; waiting for rank {_listed(gone - dead)} to join"
    gone = gone if one.replace_timeout else gone - dead
    if not gone or len(party) >= one.group_size:
        return None
    known_lost = known and newest.ended is not None and gone <= {one.rank for one in newest.ended.lost}
    patience = STANDBY_SECONDS if newest.standby else _MAJORITY_SECONDS
    patience = one.replace_timeout if seen or known_lost else max(one.replace_timeout, patience)
    left = patience - (now - max(member.joined for member in survivors.values()))
    return f"waiting for rank {_listed(gone)} to be replaced, for {left:.0f} s at most" if left > 0 else None


def _of_last_group(party: Members) -> list[Member]:
    """Return those who were in the last group whose ranks had all connected, or in the last one if none had."""
    base = max((member.fingerprint.trained, member.fingerprint.generation) for member in party.values())
    number = base[0] or base[1]
    return [m for m in party.values() if number == (m.fingerprint.trained if base[0] else m.fingerprint.generation)]


def _certainly_dead(party: Members) -> frozenset[int]:
    """Return the members of that group whose machines say that their processes are gone."""
    there = _of_last_group(party)
    return frozenset[int]().union(*(member.dead for member in there)) - {one.fingerprint.rank for one in there}


def _is_enough(party: Members, dead: frozenset[int], newest: NewestGeneration) -> bool:
    """Return whether a party is enough of the last group whose ranks had all connected to go on without the rest.

    It takes more than half of them, or half of them at the service that has formed the group, which no other part of
    it can claim, and they only once. Those who have left with a word do not count. That a process is dead does not say
    where it was when it died, perhaps in a later group, so it counts only where all others are here or dead. Where a
    later group is known, only more than half are enough.
    """
    there = _of_last_group(party)
    one = there[0].fingerprint
    base, size = (one.trained, one.trained_size) if one.trained else (one.generation, one.group_size)
    left = newest.left_of(base) - {member.fingerprint.rank for member in there}
    living = size - len(left)
    if 2 * len(there) > living:
        return True
    latest = max(member.fingerprint.generation for member in party.values()) >= newest.number
    half = 2 * len(there) == living and newest.formed_here(base)
    return latest and (half or living - len(there) <= len(dead - left))


def _listed(ranks: Iterable[int], most: int = 20) -> str:
    found = sorted(ranks)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(map(str, found[:most])) + more


BACK_SECONDS = 3.0  # a member that has left to meet the others again is awaited for this long
STUCK_SECONDS = 30.0  # a member that lives but does not come back is awaited for this long
REPORT_SECONDS = 20.0  # members of a group that ran before the service report to it within this time
STANDBY_SECONDS = 0.75  # the same at a standby, to which they come at the same moment, once most of them are there
_MOST_FORMED = 8  # generations of which it is known who was in them


class NewestGeneration:
    """The newest generation as the service knows it. Times are seconds of any clock."""

    def __init__(self) -> None:
        self.number = 0
        self.here = False  # whether it was formed by this service, which then knows all its members
        self.ranks: frozenset[int] = frozenset()
        self.ended: Ended | None = None
        self.closed_at: float | None = None  # since when its members are to meet again
        self.standby = False  # whether it came here because its service is gone
        self._back: dict[int, float] = {}  # ranks that are expected, and until when
        self._formed: dict[int, tuple[frozenset[int], set[int]]] = {}  # ranks of those formed here, and who is gone

    @property
    def closed(self) -> bool:
        """Return whether its members are to meet again."""
        return self.closed_at is not None

    def begin(self, number: int, ranks: Iterable[int], here: bool) -> None:
        """Let a generation be the newest one."""
        self.number, self.ranks, self.here = number, frozenset(ranks), here
        self.ended, self.closed_at, self._back = None, None, {}
        if here:
            self._formed[number] = self.ranks, set()
            self._formed = dict(list(self._formed.items())[-_MOST_FORMED:])
        else:
            self._formed.clear()

    def add(self, ranks: Iterable[int]) -> None:
        """Take note of further ranks of a generation that was formed elsewhere."""
        self.ranks |= frozenset(ranks)

    def formed_here(self, generation: int) -> bool:
        """Return whether this service has formed a generation, and none after it was formed elsewhere."""
        return generation in self._formed

    def left(self, rank: int) -> None:
        """Take note that a member has ended, so that it is in no other group."""
        if self.number in self._formed:
            self._formed[self.number][1].add(rank)

    def left_of(self, generation: int) -> frozenset[int]:
        """Return the members of a generation that was formed here which have ended since then, as they have said."""
        later = [gone for number, (_, gone) in self._formed.items() if number >= generation]
        return (
            self._formed[generation][0] & set().union(*later) if later and generation in self._formed else frozenset()
        )

    def hurry(self, until: float) -> None:
        """Expect nobody for longer than that."""
        self._back = {rank: min(until, other) for rank, other in self._back.items()}

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
