"""Refuses ranks that do not belong together, or whose machines do not reach each other, for a while.

Whom a refusal reaches depends on what the odd rank could be. What cannot be a rank of the job that the others wait for
is refused alone, and they go on waiting: a rank of another job, one that differs in both the job's digest and the world
size, or one whose place is taken by a rank that agrees with the others. Anything else is most likely a rank that was
started wrongly. Its group can then never be complete, so all are refused at once, and every one of them names the rank
that differs, instead of waiting until the deadline for a rank that has gone.

A rank that dies soon after each start is taken in again only after increasing delays, and so is one whose machine does
not reach another's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from horizonml.rendezvous.members import Members, Refused, duplicates, formed, parties, waiting
from horizonml.rendezvous.messages import Fingerprint, difference

_REFUSAL_SECONDS = 5.0  # ranks of a refused group that come late are told, too, for this long
_DRAW_SECONDS = 4.0  # where as many ranks wait for one job as for another, more are awaited before one is refused
_NOTE_SECONDS = 120.0  # ranks that wait learn for this long who was refused beside them


class Refusals:
    """Judges who cannot be taken in. Times are seconds of any clock."""

    def __init__(self, members: Members) -> None:
        """Judge these members, and take those out whom it refuses."""
        self._members = members
        self._late: dict[str, tuple[float, str]] = {}  # job -> until when its ranks are refused, and why
        self._notes: deque[tuple[float, str]] = deque(maxlen=3)

    def lately(self, now: float) -> list[str]:
        """Return why ranks were refused lately beside others that went on waiting."""
        return [reason for at, reason in self._notes if now - at < _NOTE_SECONDS]

    def of_latecomers(self, now: float) -> list[Refused]:
        """Refuse the ranks of a group that has just been refused."""
        self._late = {job: entry for job, entry in self._late.items() if now < entry[0]}
        return [
            self._refuse(late, reason)
            for job, (_, reason) in self._late.items()
            if (late := [number for number, member in waiting(self._members).items() if member.fingerprint.job == job])
        ]

    def of_others(self) -> list[Refused]:
        """Refuse ranks that could never be taken in by the group that runs, once that has shown that it lives."""
        refused = []
        running = formed(self._members).values()
        for number, member in waiting(self._members).items():
            alive = next((other.fingerprint for other in running if other.moved > member.joined), None)
            words = difference(alive, member.fingerprint) if alive else None
            if words is not None:
                refused.append(self._refuse([number], f"a group runs here that this rank is not part of: {words}"))
        return refused

    def of_duplicates(self, newest: int, now: float) -> list[Refused]:
        """Refuse a second process for a rank whose first one is alive; `newest` is the newest generation."""
        refused = []
        for older, newer in duplicates(self._members):
            if older not in self._members or newer not in self._members:
                continue
            old, new = self._members[older], self._members[newer]
            if old.moved <= new.joined:
                continue  # perhaps it is dead
            stale = 0 < new.fingerprint.generation < newest
            if old.formed or stale:  # a running group is not disturbed, nor is one that forms by what has left it
                words = _replaced(old.fingerprint, new.fingerprint) if stale else None
                refused.append(self._refuse([newer], words or _clash(old.fingerprint, new.fingerprint)))
            elif 0 < old.fingerprint.generation < newest and new.fingerprint.generation == 0:
                refused.append(self._refuse([older], _replaced(new.fingerprint, old.fingerprint)))
            elif old.fingerprint.group_key == new.fingerprint.group_key:
                refused.append(self._refuse_all(_clash(old.fingerprint, new.fingerprint), new.fingerprint.job, now))
        return refused

    def of_differences(self, now: float) -> list[Refused]:
        """Refuse ranks that differ from most of those who wait, alone or together with them (see above)."""
        if not (found := parties(self._members)):
            return []
        most = list(found[0].values())
        refused: list[Refused] = []
        for party in found[1:]:
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

    def _refuse(self, joins: list[int], reason: str) -> Refused:
        """Forget some joins, and return the verdict on them."""
        for number in joins:
            del self._members[number]
        return Refused(joins, reason)

    def _refuse_all(self, reason: str, job: str, now: float) -> Refused:
        """Refuse all ranks of a job that wait."""
        self._late[job] = now + _REFUSAL_SECONDS, reason
        return self._refuse(
            [n for n, member in waiting(self._members).items() if member.fingerprint.job == job], reason
        )


def _stranger(one: Fingerprint, others: list[Fingerprint]) -> bool:
    """Return whether a rank that differs from others cannot be one of theirs that was started wrongly."""
    return (
        one.job != others[0].job
        or (one.digest != others[0].digest and one.world_size != others[0].world_size)
        or any(one.rank == other.rank for other in others)
    )


def _clash(older: Fingerprint, newer: Fingerprint) -> str:
    return (
        f"rank {newer.rank} is there twice: {older.place} and {newer.place}; "
        "give every process its own rank, or end the one that is left over"
        if older.digest == newer.digest
        else f"rank {newer.rank} of job {newer.job} ({newer.place}) came while job {older.job} runs here; "
        "wait for its end, or use another rendezvous service"
    )


def _replaced(successor: Fingerprint, stale: Fingerprint) -> str:
    return (
        f"rank {stale.rank} ({stale.place}) comes from generation {stale.generation}, which has lost it, and "
        f"{successor.place} has replaced it meanwhile; end the process that is left over"
    )


SOON_SECONDS = 30.0  # a process that dies within this time of its first join has crashed at its start
WELL_SECONDS = 60.0  # once a process has run for this long, the earlier deaths of its rank are forgotten
_FREE_DEATHS = 2  # in a row, before a rank has to wait
_FIRST_WAIT, _LONGEST_WAIT = 10.0, 300.0
_MOST_RANKS = 8192  # remembered at a time

KILLED = "it was killed or lost its power"

Process = tuple[str, int]


@dataclass
class _History:
    process: Process
    first_joined: float
    died: bool = False
    deaths: int = 0  # in a row, soon after joining
    last: str = ""  # why the last one died
    place: str = ""
    until: float = 0.0  # the rank is not taken in before this time


@dataclass
class Crashes:
    """Counts the early deaths of each rank's processes. Times are seconds of any clock."""

    _of: dict[tuple[str, int], _History] = field(default_factory=dict)  # by job and rank

    def joined(self, one: Fingerprint, now: float) -> None:
        """Take note that a process joins, or joins again."""
        key, process = (one.digest, one.rank), (one.host_id, one.pid)
        known = self._of.get(key)
        if known is None:
            self._of[key] = _History(process, now)
            if len(self._of) > _MOST_RANKS:
                del self._of[next(iter(self._of))]
        elif known.process == process and known.died and one.generation > 0:  # it was only silent
            known.died, known.deaths, known.until = False, max(0, known.deaths - 1), 0.0
        # In a container, a restarted process has the process id of the one before.
        elif known.process != process or known.died:
            known.process, known.first_joined, known.died = process, max(now, known.until), False

    def died(self, one: Fingerprint, reason: str, now: float) -> None:
        """Take note that a process died, and why as far as anyone knows."""
        known = self._of.get((one.digest, one.rank))
        if known is None or known.died or known.process != (one.host_id, one.pid):
            return
        known.died = True
        if now - known.first_joined >= SOON_SECONDS:
            known.deaths = 0
            return
        known.deaths, known.last, known.place = known.deaths + 1, reason, one.hostname
        if known.deaths > _FREE_DEATHS:
            known.until = now + _wait(known.deaths)

    def ran(self, one: Fingerprint, now: float) -> None:
        """Take note that a process is a member of a group; after a while its rank's history is forgotten."""
        known = self._of.get((one.digest, one.rank))
        if known is not None and known.deaths and not known.died and now - known.first_joined >= WELL_SECONDS:
            known.deaths, known.until = 0, 0.0

    def left(self, one: Fingerprint, now: float) -> float:
        """Return for how many seconds a rank has still to wait, 0 if it may be taken in."""
        known = self._of.get((one.digest, one.rank))
        return max(0.0, known.until - now) if known is not None else 0.0

    def closed(self, digest: str, now: float) -> set[int]:
        """Return the ranks of a job that are not taken in for now."""
        return {rank for (job, rank), known in self._of.items() if job == digest and now < known.until}

    def known(self, digest: str) -> set[int]:
        """Return the ranks of a job that have joined so far, whatever has become of them."""
        return {rank for job, rank in self._of if job == digest}

    def words(self, one: Fingerprint) -> str:
        """Return for people why a rank has to wait; the same words at any time."""
        known = self._of[one.digest, one.rank]
        return (
            f"rank {one.rank} on {known.place} has ended {known.deaths} times within {SOON_SECONDS:.0f} s of joining, "
            f"last: {known.last}; it is taken in again after {_wait(known.deaths):.0f} s"
        )


def _wait(deaths: int) -> float:
    """Return for how many seconds a rank has to wait after so many early deaths in a row."""
    return min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(deaths - _FREE_DEATHS - 1, 16))


GATHER_SECONDS = 0.5  # after the first report, in which the other ends of broken links report, too
_FREE_FAILURES = 2  # of a link, before who is left out has to wait although the link works again
_FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 60.0
_REMEMBER_SECONDS = 120.0  # since its last failure, after which a link that works is taken for a good one
_TRY_AGAIN_SECONDS = 300.0  # after which a link is used again even if the machine that was left out saw no sign of it
_MOST_LINKS = 4096

Link = frozenset[str]  # the two machines, each as its `host_id`


@dataclass
class _State:
    failures: int = 0
    failed: float = 0.0
    until: float = 0.0  # the link is not used before, however well it works
    works: bool = True


class BrokenLinks:
    """Remembers which machines do not reach each other. Times are seconds of any clock."""

    def __init__(self) -> None:
        self._links: dict[Link, _State] = {}
        self._reported: float | None = None  # when the first report came on which nothing was decided yet

    def report(self, one: Fingerprint, other: Fingerprint, now: float) -> None:
        """Take note that two ranks of one group do not reach each other."""
        if one.host_id == other.host_id:
            return
        self._reported = now if self._reported is None else self._reported
        link = frozenset((one.host_id, other.host_id))
        state = self._links.setdefault(link, _State())
        if state.works:
            state.failures = state.failures + 1 if now - state.failed < _REMEMBER_SECONDS else 1
            again = state.failures - _FREE_FAILURES - 1
            state.until = now + min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**again) if again >= 0 else now
        state.works, state.failed = False, now
        if len(self._links) > _MOST_LINKS:
            del self._links[next(iter(self._links))]

    def is_due(self, now: float) -> bool:
        """Return, once after each first report, that it is time to decide who is left out."""
        due = self._reported is not None and now - self._reported >= GATHER_SECONDS
        if due:
            self._reported = None
        return due

    def works(self, one: Fingerprint) -> None:
        """Take note that all links of a rank's machine which were broken work again."""
        for link, state in self._links.items():
            if one.host_id in link:
                state.works = True

    def broken(self, now: float) -> set[Link]:
        """Return the links that are not to be used now."""
        old = [link for link, one in self._links.items() if now - one.failed > _TRY_AGAIN_SECONDS]
        for link in old:
            del self._links[link]
        return {
            link
            for link, state in self._links.items()
            if now < state.until or (not state.works and now - state.failed < _TRY_AGAIN_SECONDS)
        }


def left_out(
    members: Members,
    broken: Collection[Link],
    since: Callable[[Fingerprint], int],
    staying: Collection[int] = (),
) -> Mapping[int, list[Fingerprint]]:
    """Return the joins that are left out so that all others reach each other, and whom each of them does not reach.

    Who has most broken links goes first; those to ranks that are members since a later generation, as `since` says, do
    not count, so that newcomers drive nobody out. Between two with equally many that is the one with less to lose: who
    came later, or else has the higher rank, because rank 0 keeps the records and all shards of checkpoints. Those in
    `staying` are never left out.
    """
    left, found = dict(members), dict[int, list[Fingerprint]]()
    while True:
        unreached = {
            number: [
                other.fingerprint
                for other in left.values()
                if frozenset((other.fingerprint.host_id, one.fingerprint.host_id)) in broken
            ]
            for number, one in left.items()
            if number not in staying
        }
        if not any(unreached.values()):
            return found

        def loses_least(number: int, unreached: Mapping[int, list[Fingerprint]] = unreached) -> tuple[int, int, int]:
            one = members[number].fingerprint
            return sum(since(other) <= since(one) for other in unreached[number]), since(one), one.rank

        worst = max((number for number, others in unreached.items() if others), key=loses_least)
        found[worst] = unreached[worst]
        del left[worst]


def link_words(one: Fingerprint, other: Fingerprint) -> str:
    """Return, to follow the name of a rank that is left out, which link is broken and what becomes of the rank."""
    return (
        f"and rank {other.rank} on {other.hostname} do not reach each other ({one.address} and {other.address}); rank "
        f"{one.rank} is left out until they do"
    )
