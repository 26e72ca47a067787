"""Recognises a rank that dies soon after each start, and takes it in again only after increasing delays."""

from __future__ import annotations

from dataclasses import dataclass, field

from horizonml.rendezvous.fingerprint import Fingerprint

SOON_SECONDS = 30.0  # a process that dies within this time of its first join has crashed at its start
WELL_SECONDS = 60.0  # once a process has run for this long, the earlier deaths of its rank are forgotten
_FREE_DEATHS = 2  # in a row, before a rank has to wait
_FIRST_WAIT, _LONGEST_WAIT = 10.0, 300.0
_MOST_RANKS = 8192  # remembered at a time

KILLED = "it was killed or lost its power"

Process = tuple[str, int]


@dataclass
class _History:
    """What is known of the processes that were one rank of a job."""

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
