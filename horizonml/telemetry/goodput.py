"""Accounts for the wall time of a run: how much of it went into steps that count, and how much faults have cost.

Goodput is the share of the wall time, since the process began its first step, that faults have not taken. They take

- `outage`: from the end of the last step or evaluation before the group broke up, or was formed anew, to the beginning
  of the next step. It comprises the broken step, the time until the loss was noticed, the wait for other ranks at the
  rendezvous, the agreement on a plan, and the recovery of state;
- `repeated`: steps that this process does again, because no state was left that had them in it.

Evaluations, checkpoints and the search for a better plan do not count as lost: an undisturbed run spends that time,
too, so its goodput is 1. The account belongs to the process: a process that replaces a lost one begins a new account
with its first step, and those that survived know what the loss has cost.
"""

from __future__ import annotations

from typing import Literal

Cause = Literal["outage", "repeated"]
CAUSES: tuple[Cause, ...] = ("outage", "repeated")


class Goodput:
    """Keeps the account of one process, over all groups that it is a member of. Times are of any one clock."""

    def __init__(self) -> None:
        self._lost = dict.fromkeys(CAUSES, 0.0)  # seconds, without an outage that has not ended
        self._begun: float | None = None  # when the first step began
        self._ended: float | None = None  # when the job was complete
        self._busy = 0.0  # when the process was last seen to get on
        self._broken = False  # whether an outage has not ended; it began at `_busy`
        self._highest = 0  # the number of the latest step ever done

    def step(self, number: int, seconds: float, now: float) -> None:
        """Account for step `number` of the run, counted from 1, which took `seconds` and has ended now."""
        began = now - seconds
        if self._begun is None:
            self._begun = began
        outage = max(0.0, began - self._busy) if self._broken else 0.0
        # In this order a scrape from another thread may miss the outage for a moment, but never counts it twice.
        self._broken, self._busy = False, now
        self._lost["outage"] += outage
        if number <= self._highest:
            self._lost["repeated"] += seconds
        self._highest = max(self._highest, number)

    def got_on(self, now: float) -> None:
        """Note that something else that belongs to training, as an evaluation does, has ended now."""
        if not self._broken:
            self._busy = now

    def broke(self) -> None:
        """Note that there is no group to train in, or another one than before. Later calls add nothing to the first."""
        self._broken = self._begun is not None

    def complete(self, now: float) -> None:
        """Note that the job is complete: the account is closed."""
        if self._ended is None:
            self._ended = now

    def lost(self, now: float) -> dict[Cause, float]:
        """Return the seconds lost until now, by cause, with those of an outage that has not ended. They only grow."""
        lost = dict(self._lost)
        if self._broken:
            lost["outage"] += max(0.0, self._until(now) - self._busy)
        return lost

    def ratio(self, now: float) -> float | None:
        """Return the goodput until now, from 0 to 1, or None before the first step has ended."""
        if self._begun is None:
            return None
        wall = self._until(now) - self._begun
        return max(0.0, 1.0 - sum(self.lost(now).values()) / wall) if wall > 0 else 1.0

    def _until(self, now: float) -> float:
        return now if self._ended is None else self._ended
