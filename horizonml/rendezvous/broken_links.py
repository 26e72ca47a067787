"""Decides who is left out of a group because two machines do not reach each other, and when it may come back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from horizonml.rendezvous.members import Members
from horizonml.rendezvous.messages import (
    Fingerprint,
)

GATHER_SECONDS = 0.5  # after the first report, in which the other ends of broken links report, too
_FREE_FAILURES = 2  # of a link, before who is left out has to wait although the link works again
_FIRST_WAIT, _LONGEST_WAIT = 10.0, 60.0
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
            state.until = now + min(_LONGEST_WAIT, _FIRST_WAIT * 2.0**again) if again >= 0 else now
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

    Who has most broken links goes first. Between two with equally many that is the one with less to lose: who is a
    member since a later generation, as `since` says, or else has the higher rank, because rank 0 keeps the records and
    all shards of checkpoints. Those in `staying` are never left out.
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
            return len(unreached[number]), since(one), one.rank

        worst = max((number for number, others in unreached.items() if others), key=loses_least)
        found[worst] = unreached[worst]
        del left[worst]


def link_words(one: Fingerprint, other: Fingerprint) -> str:
    """Return, to follow the name of a rank that is left out, which link is broken and what becomes of the rank."""
    return (
        f"and rank {other.rank} on {other.hostname} do not reach each other ({one.address} and {other.address}); rank "
        f"{one.rank} is left out until they do"
    )
