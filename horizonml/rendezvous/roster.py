"""Decides who is in the group: the judgement on joins, as plain data without sockets.

The rendezvous service keeps one `Roster`. Ranks join with a fingerprint; when every rank of the world is there and
they belong together, a generation is formed. A duplicate rank, a different world size, another job or other software
is refused with words that name the rank and what differs.

Whom a refusal reaches depends on what the odd rank could be. What cannot be a rank of the job that the others wait
for is refused alone, and they go on waiting: a rank of another job, one that differs in both the job's digest and the
world size, or one whose place is taken by a rank that agrees with the others. Anything else is most likely a rank
that was started wrongly. Its group can then never be complete, so all are refused at once, and every one of them
names the rank that differs, instead of waiting until the deadline for a rank that has gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from horizonml.rendezvous.checks import MOST_RANKS
from horizonml.rendezvous.fingerprint import Fingerprint, GroupKey, difference
from horizonml.rendezvous.messages import Formed, Refused, Verdict

_MOST_JOINS = 2 * MOST_RANKS  # remembered at a time
_BEAT_SECONDS = 2.5  # a rank whose heartbeat has not moved for this long makes way for another of its number
_GONE_SECONDS = 5.0  # a rank whose heartbeat has not moved for this long is forgotten
_REFUSAL_SECONDS = 5.0  # ranks of a refused group that come late are told, too, for this long
_DRAW_SECONDS = 4.0  # where as many ranks wait for one job as for another, more are awaited before one is refused
_NOTE_SECONDS = 120.0  # ranks that wait learn for this long who was refused beside them


@dataclass
class _Member:
    """A rank that waits, or is in the newest group."""

    fingerprint: Fingerprint
    joined: float
    moved: float  # when its heartbeat last moved
    beat: int = -1
    formed: bool = False
    beside: frozenset[int] = frozenset()  # the ranks of the group it runs in, as far as it said


Members = dict[int, _Member]


class Roster:
    """Knows who waits, who is in the newest group, and what was refused lately. Times are seconds of any clock."""

    def __init__(self, settled: float = float("-inf")) -> None:
        """Hold no first meeting until `settled`, because a group that runs already may have to report first."""
        self.generation = 0
        self._formed_here = 0  # the generation that this roster formed last
        self._settled = settled
        self._members: Members = {}  # in the order of their arrival
        self._late: dict[str, tuple[float, str]] = {}  # job -> until when its ranks are refused, and why
        self._notes: deque[tuple[float, str]] = deque(maxlen=3)

    def join(self, number: int, fingerprint: Fingerprint, now: float) -> None:
        """Take in a rank that asks to take part; `number` names this join. Raises ValueError."""
        self._check(number)
        self._members[number] = _Member(fingerprint, joined=now, moved=now)

    def resume(self, number: int, fingerprint: Fingerprint, beside: Iterable[int], now: float) -> None:
        """Take in a member of a group that runs already: this roster is younger, or took it for gone.

        `fingerprint.generation` is that group's, and `beside` are its ranks. Raises ValueError.
        """
        if number in self._members or any(m.fingerprint.same_process(fingerprint) for m in self._members.values()):
            return
        self._check(number)
        if fingerprint.generation < self.generation:
            raise ValueError(f"rank {fingerprint.rank} reports from generation {fingerprint.generation}, which is over")
        self.generation = fingerprint.generation
        self._members[number] = _Member(fingerprint, now, now, formed=True, beside=frozenset(beside))

    def leave(self, number: int) -> None:
        """Forget a rank that leaves."""
        self._members.pop(number, None)

    def withdraw(self, number: int) -> bool:
        """Let a rank go if it still waits, and return whether it does; a member of a formed group stays one."""
        waits = number in self._waiting()
        if waits:
            del self._members[number]
        return waits

    def beat(self, number: int, count: int, now: float) -> None:
        """Take note that a rank's heartbeat stands at `count`."""
        member = self._members.get(number)
        if member is not None and member.beat != count:
            member.beat, member.moved = count, now

    def joins(self) -> list[int]:
        """Return the joins whose heartbeats matter."""
        return list(self._members)

    def decide(self, now: float) -> list[Verdict]:
        """Return what has become clear since the last call."""
        self._forget(now)
        verdicts: list[Verdict] = [*self._refuse_latecomers(now), *self._judge_duplicates(now)]
        if self.running():
            return [*verdicts, *self._refuse_others()]  # there is no second group beside it
        verdicts += self._judge_differences(now)
        for party in self._parties():
            each_once = len({member.fingerprint.rank for member in party.values()}) == len(party)
            if each_once and (self._complete(party, now) or self._may_shrink(party, now)):
                return [*verdicts, self._form(party)]
        return verdicts

    def present(self) -> list[int]:
        """Return the ranks that wait for the same job: the one that most of those who wait want."""
        return sorted({member.fingerprint.rank for party in self._parties()[:1] for member in party.values()})

    def missing(self) -> list[int]:
        """Return the ranks that those who are present wait for."""
        sizes = (member.fingerprint.world_size for party in self._parties()[:1] for member in party.values())
        return sorted(set(range(max(sizes, default=0))) - set(self.present()))

    def running(self) -> list[int]:
        """Return the joins of the group that runs."""
        return [number for number, member in self._members.items() if member.formed]

    def newcomers(self) -> list[int]:
        """Return the ranks that wait and could take part in the group that runs without them."""
        running = [self._members[number] for number in self.running()]
        inside = {member.fingerprint.rank for member in running}.union(*(member.beside for member in running))
        return sorted(
            member.fingerprint.rank
            for member in self._waiting().values()
            if running
            and member.fingerprint.rank not in inside
            and member.fingerprint.group_key == running[0].fingerprint.group_key
        )

    def refused(self, now: float) -> list[str]:
        """Return why ranks were refused lately beside others that went on waiting."""
        return [reason for at, reason in self._notes if now - at < _NOTE_SECONDS]

    def _check(self, number: int) -> None:
        """Raise ValueError unless there is room for a join of this number."""
        if number in self._members:
            raise ValueError("its join has another's number")
        if len(self._members) >= _MOST_JOINS:
            raise ValueError(f"{_MOST_JOINS} ranks wait already")

    def _waiting(self) -> Members:
        """Return those who have not been taken into a group."""
        return {number: member for number, member in self._members.items() if not member.formed}

    def _parties(self) -> list[Members]:
        """Return those who wait, sorted by what they have in common: the most first, else the earliest."""
        parties: dict[GroupKey, Members] = {}
        for number, member in self._waiting().items():
            parties.setdefault(member.fingerprint.group_key, {})[number] = member
        return sorted(parties.values(), key=len, reverse=True)

    def _complete(self, party: Members, now: float) -> bool:
        """Return whether all ranks of a world are there and may begin."""
        members = [member.fingerprint for member in party.values()]
        return len(members) == members[0].world_size and (
            now >= self._settled or any(member.generation > 0 for member in members)
        )

    def _may_shrink(self, party: Members, now: float) -> bool:
        """Return whether the survivors of a group may go on without those that do not come back."""
        survivors = [member.fingerprint for member in party.values() if member.fingerprint.generation > 0]
        if not survivors:
            return False  # a first meeting needs everyone
        last = max(survivors, key=lambda fingerprint: fingerprint.generation)
        if last.replace_timeout <= 0 or len(party) < last.min_world_size:
            return False
        if last.generation != self._formed_here and 2 * len(survivors) <= last.group_size:
            return False  # this service did not see that group form: only its majority may go on
        return now - max(member.joined for member in party.values()) > last.replace_timeout

    def _duplicates(self) -> list[tuple[int, int]]:
        """Return pairs of joins for the same rank: first the one that runs, or came first."""
        first: dict[int, int] = {}
        pairs = []
        for number in [*self.running(), *self._waiting()]:
            rank = self._members[number].fingerprint.rank
            if rank in first:
                pairs.append((first[rank], number))
            first.setdefault(rank, number)
        return pairs

    def _forget(self, now: float) -> None:
        """Drop ranks that are gone: replaced by themselves, or silent for too long."""
        for older, newer in self._duplicates():
            if older not in self._members:
                continue
            old = self._members[older]
            if old.fingerprint.same_process(self._members[newer].fingerprint) or now - old.moved > _BEAT_SECONDS:
                del self._members[older]
        for number, member in list(self._members.items()):
            if now - member.moved > _GONE_SECONDS:
                del self._members[number]

    def _refuse_latecomers(self, now: float) -> list[Refused]:
        """Refuse the ranks of a group that has just been refused."""
        self._late = {job: entry for job, entry in self._late.items() if now < entry[0]}
        return [
            self._refuse(late, reason)
            for job, (_, reason) in self._late.items()
            if (late := [number for number, member in self._waiting().items() if member.fingerprint.job == job])
        ]

    def _refuse_others(self) -> list[Refused]:
        """Refuse ranks that could never be taken in by the group that runs, once that has shown that it lives."""
        refused = []
        running = [self._members[number] for number in self.running()]
        for number, member in self._waiting().items():
            alive = next((other.fingerprint for other in running if other.moved > member.joined), None)
            words = difference(alive, member.fingerprint) if alive else None
            if words is not None:
                refused.append(self._refuse([number], f"a group runs here that this rank is no part of: {words}"))
        return refused

    def _judge_duplicates(self, now: float) -> list[Refused]:
        """Refuse a second process for a rank whose first one is alive."""
        refused = []
        for older, newer in self._duplicates():
            if older not in self._members or newer not in self._members:
                continue
            old, new = self._members[older], self._members[newer]
            if old.moved <= new.joined:
                continue  # perhaps it is dead
            if old.formed:  # a running group is not disturbed
                refused.append(self._refuse([newer], _clash(old.fingerprint, new.fingerprint)))
            elif old.fingerprint.group_key == new.fingerprint.group_key:
                refused.append(self._refuse_all(_clash(old.fingerprint, new.fingerprint), new.fingerprint.job, now))
        return refused

    def _judge_differences(self, now: float) -> list[Refused]:
        """Refuse ranks that differ from most of those who wait, alone or together with them (see above)."""
        if not (parties := self._parties()):
            return []
        most = list(parties[0].values())
        refused: list[Refused] = []
        for party in parties[1:]:
            for number, member in party.items():
                # Only who shows life since then can tell: processes that were killed may just have been started anew.
                alive = [other.fingerprint for other in most if other.moved >= member.joined]
                words = difference(alive[0], member.fingerprint) if alive else None
                if words is None:
                    continue
                if not _stranger(member.fingerprint, alive):
                    return [*refused, self._refuse_all(words, member.fingerprint.job, now)]
                if len(party) < len(most) or now - member.joined > _DRAW_SECONDS:
                    self._notes.append((now, words))
                    refused.append(self._refuse([number], words))
        return refused

    def _form(self, party: Members) -> Formed:
        """Make a party the group that runs, and return the verdict."""
        # A service that was started anew goes on where the one before was.
        self.generation = 1 + max(self.generation, *(member.fingerprint.generation for member in party.values()))
        self._formed_here = self.generation
        ranked = {member.fingerprint.rank: number for number, member in party.items()}
        joins = [ranked[rank] for rank in sorted(ranked)]
        for member in party.values():
            member.formed = True
        return Formed(self.generation, joins, [party[number].fingerprint for number in joins])

    def _refuse(self, joins: list[int], reason: str) -> Refused:
        """Forget some joins, and return the verdict on them."""
        for number in joins:
            del self._members[number]
        return Refused(joins, reason)

    def _refuse_all(self, reason: str, job: str, now: float) -> Refused:
        """Refuse all ranks of a job that wait."""
        self._late[job] = now + _REFUSAL_SECONDS, reason
        return self._refuse([n for n, member in self._waiting().items() if member.fingerprint.job == job], reason)


def _stranger(one: Fingerprint, others: list[Fingerprint]) -> bool:
    """Return whether a rank that differs from others cannot be one of theirs that was started wrongly."""
    return (
        one.job != others[0].job
        or (one.digest != others[0].digest and one.world_size != others[0].world_size)
        or any(one.rank == other.rank for other in others)
    )


def _clash(older: Fingerprint, newer: Fingerprint) -> str:
    """Return in words why two processes cannot be the same rank."""
    return (
        f"rank {newer.rank} is there twice: {older.place} and {newer.place}; "
        "give every process its own rank, or end the one that is left over"
        if older.digest == newer.digest
        else f"rank {newer.rank} of job {newer.job} ({newer.place}) came while job {older.job} runs here; "
        "wait for its end, or use another rendezvous service"
    )
