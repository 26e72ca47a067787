"""Decides who is in the group: the judgement on joins, as plain data without sockets.

The rendezvous service keeps one `Roster`. Ranks join with a fingerprint; when all ranks are there that a group needs
(see `members`), and they belong together, a generation is formed. Others are refused (see `refusals`).

A generation is over as soon as a member is silent for too long, leaves for a reason that ends the group, or joins
anew. Its members then meet again. Unless they wait for replacements, the next generation forms as soon as all living
members are back, without the lost ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from horizonml.rendezvous.identity import Numbers
from horizonml.rendezvous.members import (
    ABSENT_SECONDS,
    BACK_SECONDS,
    REPORT_SECONDS,
    STANDBY_SECONDS,
    Complete,
    Completion,
    Formed,
    Member,
    Members,
    NewestGeneration,
    Refused,
    duplicates,
    formed,
    parties,
    ranks_of,
    short_of,
    waiting,
)
from horizonml.rendezvous.messages import (
    Departure,
    Ended,
    Farewell,
    Fingerprint,
    GivenNumber,
    HeldBack,
    Lost,
    NumberRequest,
    difference,
)
from horizonml.rendezvous.refusals import KILLED, BrokenLinks, Crashes, Refusals, left_out, link_words
from horizonml.rendezvous.wire import MOST_RANKS

Verdict = Formed | Refused | Complete

LOST_SECONDS = 4.0  # a rank whose heartbeat has not moved for this long is lost
_MOST_JOINS = 2 * MOST_RANKS  # remembered at a time
_MOST_FENCED = 4 * MOST_RANKS
_BEAT_SECONDS = 2.5  # a rank whose heartbeat has not moved for this long makes way for another of its number
_MOST_HELD_SHOWN, _MOST_PROBED = 50, 64
_DOUBT_SECONDS = 2.0  # no group forms with a rank whose heartbeat has not moved for this long

_FURTHEST = 1_000_000  # generations by which a rank may be ahead of a service that was started anew


class Over(ValueError):
    """Raised when a rank reports from a generation that is over."""


class Roster:
    """Knows who waits, who is in the newest group, and what was refused lately. Times are seconds of any clock."""

    def __init__(self, settled: float = float("-inf"), workers: int | None = None, standby: bool = False) -> None:
        """Hold no first meeting until `settled`, because a group that runs already may have to report first.

        Ranks that ask for the world size learn that of the others, or else that it is `workers`. A `standby` holds no
        first meeting at all; to it the members of a group come when their service is gone.
        """
        self._workers, self._standby = workers, standby
        self.lock = threading.RLock()  # held by whoever uses a roster that several threads use
        self._settled = float("inf") if standby else settled
        self._members: Members = {}
        self._newest = NewestGeneration()
        self._newest.standby = standby
        self._refusals = Refusals(self._members)
        self._completion = Completion(self._members)
        self._numbers = Numbers()
        self._crashes = Crashes()
        self._links = BrokenLinks()
        self._since: dict[tuple[str, int, int], int] = {}  # the first generation that a process was a member of
        self._formed: set[tuple[str, int, int]] = set()  # the processes of the newest group that was formed here
        self._fenced: dict[int, None] = {}  # joins that were declared lost
        self._farewells: dict[int, Farewell] = {}  # which the service has not published yet
        self._endings: dict[int, Ended] = {}  # likewise

    @property
    def generation(self) -> int:
        """Return the number of the newest generation."""
        return self._newest.number

    def join(self, number: int, fingerprint: Fingerprint, now: float) -> None:
        """Take in a rank that asks to take part; `number` names this join. Raises ValueError."""
        self._check(number)
        self._check_past(fingerprint)
        for older, member in formed(self._members).items():
            if member.fingerprint.same_process(fingerprint) and member.fingerprint.rank == fingerprint.rank:
                self._supersede(older, fingerprint, now)
        comes_back = fingerprint.generation == self.generation > 0
        if comes_back and formed(self._members) and not self._newest.closed:
            self._end(f"rank {fingerprint.rank} on {fingerprint.hostname} has left the group and joins anew", (), now)
        if comes_back:
            self._newest.came(fingerprint.rank)
        self._crashes.joined(fingerprint, now)
        self._members[number] = Member(fingerprint, joined=now, moved=now)
        self._hurry(now)

    def resume(self, number: int, fingerprint: Fingerprint, beside: Iterable[int], now: float) -> bool:
        """Take in a member of a group that runs already: this roster is younger than it.

        `fingerprint.generation` is that group's, and `beside` are its ranks. Returns whether the member was not known.
        Raises Over if that group is over, and ValueError if it cannot be one of this run: the group that runs at this
        service goes on undisturbed.
        """
        rank, generation = fingerprint.rank, fingerprint.generation
        known = [one for one in self._members.values() if one.fingerprint.same_process(fingerprint)]
        if number in self._members or (known and generation <= self.generation):
            return False
        self._check(number)
        stale = generation < self.generation or (generation == self.generation and self._newest.ended is not None)
        if stale or number in self._fenced:
            words = f"rank {rank} reports from generation {generation}, which is over"
            self._fence(number, Farewell(words, Departure.SILENT))
            if generation != self.generation:  # how the newest one ended is known
                self._endings.setdefault(generation, Ended(words))
            raise Over(words)
        beside = frozenset(beside)
        self._check_report(fingerprint, beside)
        if generation > self.generation:
            for older in formed(self._members):
                self._members.pop(older)
            self._newest.begin(generation, beside, here=False)
            for other in beside:
                # The few who come to a standby may be those who are cut off, so they declare nobody lost.
                self._newest.expect(other, float("inf") if self._standby else now + REPORT_SECONDS)
        self._newest.add(beside)
        self._newest.came(rank)
        self._members[number] = Member(fingerprint, now, now, formed=True, beside=beside)
        self._settled = min(self._settled, now)
        self._hurry(now)
        return True

    def leave(self, number: int, farewell: Farewell, now: float) -> bool:
        """Let a rank go, and return whether it was not declared lost before."""
        member = self._members.pop(number, None)
        if member is None or not member.formed:
            return number not in self._fenced
        rank, hostname = member.fingerprint.rank, member.fingerprint.hostname
        if farewell.kind not in (Departure.AGAIN, Departure.LOST_PEER):
            self._newest.left(rank)
        if farewell.kind is Departure.COMPLETE:
            self._completion.note(member.fingerprint, now)
        if farewell.kind in (Departure.AGAIN, Departure.LOST_PEER):
            self._newest.expect(rank, now + BACK_SECONDS)
        if farewell.kind is Departure.AGAIN:
            self._newest.close(now)
        elif farewell.kind is Departure.LOST_PEER:
            self._end(f"rank {rank} on {hostname} {farewell.reason}", (), now)
        elif farewell.kind.blames:
            self._crashes.died(member.fingerprint, farewell.reason, now)
            lost = Lost(rank, hostname, f"left: {farewell.reason}", 0.0)
            self._end(str(lost), [lost], now)
        return True

    def give_number(self, ask: NumberRequest, now: float) -> GivenNumber | None:
        """Return a rank number for a process, or None as long as it is not clear who is there.

        Raises ValueError if all numbers are in use.
        """
        if now < self._settled or self._newest.unreported(now):
            return None
        members = [member.fingerprint for member in self._members.values()]
        held = {one.rank: (one.host_id, one.pid) for one in members}
        # While less than half of a group is here, the others may go on elsewhere, so their numbers are not free.
        there = self._of_groups()
        doubtful = self._newest.ranks - set(held) if 0 < 2 * len(there) < len(self._newest.ranks) else set[int]()
        held |= dict.fromkeys((self._newest.expected(now) | doubtful) - set(held), ("", 0))
        # Ranks that the service was told of have their numbers from elsewhere, and may still be on their way.
        before = self._crashes.known(ask.digest) | self._newest.ranks | set(range(self._workers or 0))
        rank = ask.rank
        if rank is None:
            rank = self._numbers.give(ask, held, self._crashes.closed(ask.digest, now), before, now)
        if rank is None and doubtful:
            return None
        if rank is None:
            raise ValueError(
                f"the run takes at most {ask.most} ranks (parallel.max_workers), and all their numbers are in use"
            )
        given = self._workers or ask.world_size
        world_size = next((one.world_size for one in members if one.digest == ask.digest), given)
        return GivenNumber(rank, world_size)

    def keep_number(self, rank: int, process: tuple[str, int], now: float, seconds: float) -> bool:
        """Keep a rank number for a process for some seconds, and return whether it can have it."""
        return self._numbers.keep(rank, process, now, seconds)

    def unreached(self, number: int, ranks: Iterable[int], now: float) -> None:
        """Take note that a member does not reach other members of its group."""
        running = {self._members[other].fingerprint.rank: self._members[other] for other in self.running()}
        one = self._members.get(number)
        for rank in set(ranks) & set(running):
            other = running[rank]
            # Who gives no sign of life itself is about to be lost, and no link is to blame.
            if one is not None and one.formed and other.silent(now) < _BEAT_SECONDS:
                self._links.report(one.fingerprint, other.fingerprint, now)

    def reached(self, number: int) -> None:
        """Take note that a rank that was left out reaches all others again."""
        if number in waiting(self._members):
            self._links.works(self._members[number].fingerprint)

    def withdraw(self, number: int) -> bool:
        """Let a rank go if it still waits, and return whether it does; a member of a formed group stays one."""
        waits = number in waiting(self._members)
        if waits:
            del self._members[number]
        return waits

    def beat(self, number: int, count: int, now: float, dead: Iterable[int] = ()) -> None:
        """Take note that a rank's heartbeat stands at `count`, and that these ranks of its last group are dead."""
        member = self._members.get(number)
        if member is not None and member.beat != count:
            member.beat, member.moved = count, now
            member.dead = frozenset(dead) - {member.fingerprint.rank}

    def slept(self, seconds: float, now: float) -> None:
        """Take note that the service itself was away for so long: that is no rank's silence."""
        for member in self._members.values():
            member.moved = min(member.moved + seconds, now)

    def decide(self, now: float) -> list[Verdict]:
        """Return what has become clear since the last call."""
        self._forget(now)
        self._end_if_a_link_is_broken(now)
        for member in formed(self._members).values():
            self._crashes.ran(member.fingerprint, now)
        verdicts: list[Verdict] = [
            *self._completion.of_latecomers(now),
            *self._refusals.of_latecomers(now),
            *self._refusals.of_duplicates(self.generation, now),
        ]
        if formed(self._members) and not self._newest.closed:
            return [*verdicts, *self._refusals.of_others()]  # there is no second group beside it
        verdicts += self._refusals.of_differences(now)
        for party in self._parties(now):
            each_once = len(ranks_of(party)) == len(party)
            if each_once and self._short(party, now) is None:
                return [*verdicts, self._form(party, now)]
        return verdicts

    def endings(self) -> dict[int, Ended]:
        """Return the generations that are over since the last call, or of whose end more is known."""
        endings, self._endings = self._endings, {}
        return endings

    def farewells(self) -> dict[int, Farewell]:
        """Return what is to be said of joins that were declared lost since the last call."""
        farewells, self._farewells = self._farewells, {}
        return farewells

    def present(self) -> list[int]:
        """Return the ranks that wait for the same job: the one that most of those who wait want."""
        return sorted(rank for party in parties(self._members)[:1] for rank in ranks_of(party))

    def missing(self) -> list[int]:
        """Return the ranks that those who are present wait for."""
        sizes = (member.fingerprint.world_size for party in parties(self._members)[:1] for member in party.values())
        return sorted(set(range(max(sizes, default=0))) - set(self.present()))

    def short(self, now: float) -> str:
        """Return for people what those who are present wait for."""
        found = self._parties(now)[:1]
        return (self._short(found[0], now) or "") if found and not self.running() else ""

    def running(self) -> list[int]:
        """Return the joins of the group that runs."""
        return list(formed(self._members)) if self._newest.ended is None else []

    def held_back(self, now: float) -> dict[int, HeldBack]:
        """Return who has come but is not taken in yet, by join: crashed too often, or cut off from others."""
        held = {
            number: HeldBack(self._crashes.words(member.fingerprint), left)
            for number, member in waiting(self._members).items()
            if (left := self._crashes.left(member.fingerprint, now))
        }
        for number, others in self._left_out(now).items():
            one = self._members[number].fingerprint
            words = f"rank {one.rank} on {one.hostname} {link_words(one, others[0])}"
            probe = tuple((two.address, two.link_port) for two in others[:_MOST_PROBED])
            held.setdefault(number, HeldBack(words, 0.0, probe=probe))
        return dict(list(held.items())[:_MOST_HELD_SHOWN])

    def newcomers(self, now: float) -> list[int]:
        """Return the ranks that wait and could take part in the group that runs without them."""
        running, cut_off = [self._members[number] for number in self.running()], self._left_out(now)
        inside = {member.fingerprint.rank for member in running}.union(*(member.beside for member in running))
        return sorted(
            member.fingerprint.rank
            for number, member in waiting(self._members).items()
            if running
            and number not in cut_off
            and member.fingerprint.rank not in inside
            and not self._crashes.left(member.fingerprint, now)
            and member.fingerprint.group_key == running[0].fingerprint.group_key
        )

    def refused(self, now: float) -> list[str]:
        """Return why ranks were refused lately beside others that went on waiting."""
        return self._refusals.lately(now)

    def _of_groups(self) -> list[Member]:
        """Return those who are or were in a group; where none is here, there is nothing to protect from a newer one."""
        return [one for one in self._members.values() if one.formed or one.fingerprint.generation]

    def _hurry(self, now: float) -> None:
        """Let a standby expect the others for a moment only, once it is clear that most of a group come to it."""
        there = [one for one in self._members.values() if one.fingerprint.generation == self.generation]
        if self._standby and 2 * len(there) > len(self._newest.ranks):
            self._newest.hurry(now + STANDBY_SECONDS)

    def _check(self, number: int) -> None:
        if number in self._members:
            raise ValueError("its join has another's number")
        if len(self._members) >= _MOST_JOINS:
            raise ValueError(f"{_MOST_JOINS} ranks wait already")

    def _check_past(self, one: Fingerprint) -> None:
        """Raise ValueError if a rank that joins says that it was in a group in which it cannot have been."""
        # Unless some came from a group that met elsewhere since then: the others of it are to come as well.
        known = [member.fingerprint.generation for member in self._of_groups()]
        here = self._newest.here and bool(known) and max(known) <= self.generation
        member = (one.machine, one.pid, one.rank) in self._formed  # which may have met others elsewhere since then
        if here and one.generation == self.generation:
            strange = not member
        else:
            strange = one.generation > (self.generation if here and not member else self.generation + _FURTHEST)
        if strange:
            raise ValueError(
                f"rank {one.rank} ({one.place}) comes from a generation {one.generation} that did not meet at this "
                "service, so it is of another run; start it anew"
            )

    def _check_report(self, one: Fingerprint, beside: frozenset[int]) -> None:
        """Raise ValueError unless a rank that reports from a group may be in the one that runs, or in a first one."""
        running = [member.fingerprint for member in formed(self._members).values()]
        newer, meets_again = one.generation > self.generation, self._newest.ended is None
        known = running or [member.fingerprint for member in self._of_groups()]
        if known and known[0].group_key != one.group_key:
            problem = f"but the group that runs here is of another run ({difference(known[0], one)})"
        elif self._newest.here and (running or (known and meets_again)):  # and all its members are known
            problem = "which this service did not form"
        elif one.rank not in beside or len(beside) != one.group_size or one.generation > self.generation + _FURTHEST:
            problem = "whose ranks it misstates"
        elif not newer and (beside != self._newest.ranks or one.rank in [other.rank for other in running]):
            problem = "of which others say something else"
        else:
            return
        raise ValueError(f"rank {one.rank} ({one.place}) reports from generation {one.generation}, {problem}")

    def _parties(self, now: float) -> list[Members]:
        """Return those who wait for the same job; who was in the newest generation comes before all others.

        Who may be dead is left out: the others need not begin with it, nor be held up by it.
        """

        def survivors(party: Members) -> bool:
            return any(member.fingerprint.generation == self.generation > 0 for member in party.values())

        cut_off = self._left_out(now)
        ready = {
            number: one
            for number, one in self._members.items()
            if one.silent(now) <= _DOUBT_SECONDS
            and number not in cut_off
            and not self._crashes.left(one.fingerprint, now)
        }
        return sorted(parties(ready), key=lambda party: not survivors(party))

    def _left_out(self, now: float) -> Mapping[int, list[Fingerprint]]:
        """Return the joins that wait and are left out for their links, and whom each of them does not reach."""
        broken, found = self._links.broken(now), dict[int, list[Fingerprint]]()
        alive = {number: one for number, one in self._members.items() if one.silent(now) <= _DOUBT_SECONDS}
        running = {number: self._members[number] for number in self.running()}
        for party in parties(alive) if broken else ():
            found |= left_out({**running, **party}, broken, self._member_since, running)
        return found

    def _member_since(self, one: Fingerprint) -> int:
        """Return the first generation that a process was a member of, or the next one if it was of none."""
        return self._since.get((one.machine, one.pid, one.rank), self.generation + 1)

    def _end_if_a_link_is_broken(self, now: float) -> None:
        """Declare the newest generation over without those whose links to other members are broken."""
        if not self._links.is_due(now):
            return
        running = {number: self._members[number] for number in self.running()}
        found = left_out(running, self._links.broken(now), self._member_since)
        lost = []
        for number, others in found.items():
            one = running[number].fingerprint
            lost.append(Lost(one.rank, one.hostname, link_words(one, others[0]), 0.0))
        if lost:
            self._end("; ".join(map(str, lost)), lost, now)

    def _supersede(self, older: int, newer: Fingerprint, now: float) -> None:
        """Let a member go whose process joins again, by itself or started anew under the same number of process."""
        rank, hostname = newer.rank, newer.hostname
        del self._members[older]
        if newer.generation != self.generation:
            self._crashes.died(newer, KILLED, now)
            lost = Lost(rank, hostname, "was started anew", 0.0)
            self._end(str(lost), [lost], now)
        elif not self._newest.closed:
            self._end(f"rank {rank} on {hostname} has left the group and joins anew", (), now)

    def _forget(self, now: float) -> None:
        """Drop ranks that are gone: replaced by themselves, or silent for too long."""
        for older, newer in duplicates(self._members):
            if older not in self._members:
                continue
            old = self._members[older]
            if old.fingerprint.same_process(self._members[newer].fingerprint) or old.silent(now) > _BEAT_SECONDS:
                self._lose(older, now)
        for number, member in list(self._members.items()):
            if member.silent(now) > LOST_SECONDS:
                self._lose(number, now)
        late = self._newest.overdue(now)
        if late and not self._newest.closed:
            lost = [Lost(rank, "", "has not reported to the rendezvous service", 0.0) for rank in late]
            self._end("; ".join(map(str, lost)), lost, now)

    def _lose(self, number: int, now: float) -> None:
        """Drop a rank that is gone; what a member still does for its generation is fenced off."""
        member = self._members.pop(number)
        if member.silent(now) >= ABSENT_SECONDS:
            self._crashes.died(member.fingerprint, KILLED, now)
        if not member.formed:
            return
        awake = member.silent(now) < ABSENT_SECONDS
        words = "has not come back to meet the others again" if awake else "gives no sign of life"
        silent = 0.0 if awake else member.silent(now)
        lost = Lost(member.fingerprint.rank, member.fingerprint.hostname, words, silent)
        self._fence(number, Farewell(str(lost), Departure.SILENT))
        self._end(str(lost), [lost], now)

    def _fence(self, number: int, farewell: Farewell) -> None:
        self._fenced[number] = None
        if len(self._fenced) > _MOST_FENCED:
            del self._fenced[next(iter(self._fenced))]
        self._farewells[number] = farewell

    def _end(self, reason: str, lost: Iterable[Lost], now: float) -> None:
        before = self._newest.ended
        if (ended := self._newest.end(reason, lost, now)) != before:
            self._endings[self.generation] = ended

    def _short(self, party: Members, now: float) -> str | None:
        return short_of(party, self._members, self._newest, self._settled, now)

    def _form(self, party: Members, now: float) -> Formed:
        """Make a party the group that runs, and return the verdict."""
        for number in formed(self._members):
            self._lose(number, now)
        # A service that was started anew goes on where the one before was.
        generation = 1 + max(self.generation, *(member.fingerprint.generation for member in party.values()))
        self._newest.begin(generation, ranks_of(party), here=True)
        self._formed = {(one.machine, one.pid, one.rank) for one in (member.fingerprint for member in party.values())}
        self._since = {process: self._since.get(process, generation) for process in self._formed}
        self._completion.forget()
        self._settled = min(self._settled, now)
        ranked = {member.fingerprint.rank: number for number, member in party.items()}
        joins = [ranked[rank] for rank in sorted(ranked)]
        for member in party.values():
            member.formed = True
        return Formed(generation, joins, [party[number].fingerprint for number in joins])
