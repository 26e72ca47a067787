"""Decides when the ranks that wait may form a group, and says in words what they wait for until then."""

from __future__ import annotations

from collections.abc import Iterable

from horizonml.rendezvous.members import Members, formed, ranks_of
from horizonml.rendezvous.newest import STUCK_SECONDS, NewestGeneration

ABSENT_SECONDS = 0.75  # three heartbeats: who has sent none for so long is not awaited once the others are back
_BEGIN_SECONDS = 10.0  # after its last join, a first meeting begins with fewer ranks than the world size, where it may
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
    if absent := awaited(members, newest, now) - present:
        return f"waiting for rank {_listed(absent)} to meet the others again"
    last = max(member.fingerprint.generation for member in party.values())
    if last == 0:
        return _short_of_first(party, settled, now)
    return _short_of_next(party, last, newest, now)


def _short_of_first(party: Members, settled: float, now: float) -> str | None:
    """Return why a party may not begin."""
    one, count = next(iter(party.values())).fingerprint, len(party)
    if count < one.world_size:
        absent = sorted(set(range(one.world_size)) - ranks_of(party))[: one.world_size - count]
        words = f"waiting for rank {_listed(absent)} to join"
        if not 0 < one.begin_with <= count:
            return words
        left = _BEGIN_SECONDS - (now - max(member.joined for member in party.values()))
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
    if not seen and len(party) >= one.world_size:
        return None
    if not seen and 2 * len(survivors) <= one.group_size:
        return (  # this service did not see that group form: only its majority may go on
            f"fewer than half of the group before are here; waiting for rank {_listed(gone)} to join"
        )
    if not gone or len(party) >= one.group_size:
        return None
    patience = one.replace_timeout if seen else max(one.replace_timeout, _MAJORITY_SECONDS)
    left = patience - (now - max(member.joined for member in survivors.values()))
    return f"waiting for rank {_listed(gone)} to be replaced, for {left:.0f} s at most" if left > 0 else None


def _listed(ranks: Iterable[int], most: int = 20) -> str:
    """Return ranks for people."""
    found = sorted(ranks)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(map(str, found[:most])) + more
