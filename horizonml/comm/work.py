"""Waits for messages and sums that are under way, no longer than their group lasts."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor

from horizonml.errors import PeerLost

WAIT_SECONDS = 0.2  # before a rank looks again whether its group is over
_WAIT = timedelta(seconds=WAIT_SECONDS)

# gloo raises these when a connection breaks, and when a message does not fit.
GLOO_ERRORS = (RuntimeError, ValueError)


@dataclass
class Moves:
    """Counts the messages and sums of a group, so that a thread can see whether it makes progress."""

    count: int = 0


class Work(Protocol):
    """Stands for a message or a sum that is under way."""

    def wait(self) -> Any:
        """Block until the work is done."""


class Collective:
    """Stands for a sum that is under way, for which a rank waits no longer than its group lasts.

    When a connection is closed at the very moment at which one of gloo's threads begins to wait for it, gloo may miss
    that, and wake up at the group's timeout only.
    """

    def __init__(self, work: Any, over: threading.Event) -> None:
        self._work, self._over = work, over

    def wait(self) -> None:
        while True:
            try:
                self._work.wait(_WAIT)
                return
            except RuntimeError:
                if self._work.is_completed():
                    self._work.wait()  # which raises what went wrong, unless it was done just after the time was up
                    return
                if self._over.is_set():
                    raise PeerLost("the group was broken off") from None


class Chain:
    """Stands for sums that follow one another by themselves; the last one's future is waited for like a `Collective`.

    A future of PyTorch's cannot be waited for with a time limit.
    """

    def __init__(self, future: Any, over: threading.Event) -> None:
        self._future, self._over = future, over
        self._done = threading.Event()
        future.add_done_callback(lambda _: self._done.set())

    def wait(self) -> None:
        while not self._done.wait(WAIT_SECONDS):
            if self._over.is_set():
                raise PeerLost("the group was broken off")
        self._future.wait()  # which raises what went wrong


class Done:
    """Stands for work that was complete as soon as it began."""

    def wait(self) -> None:
        return None


@dataclass
class FromItself:
    """Stands for a message from this rank to itself, which is sent by the time the rank waits for it."""

    outbox: dict[int, Tensor]
    tag: int
    into: Tensor

    def wait(self) -> None:
        self.into.copy_(self.outbox.pop(self.tag))


def lost(peer: int | None, error: Exception) -> PeerLost:
    """Return what is to be raised instead of an error of gloo's."""
    who = "a peer" if peer is None else f"rank {peer}"
    timed_out = "Timed out" in str(error)
    reason = "did not answer in time" if timed_out else "closed its connection"
    return PeerLost(f"{who} {reason} ({short(error)})", timed_out=timed_out)


def short(error: Exception) -> str:
    """Return gloo's message without the place in its source and its advice."""
    line = str(error).strip().splitlines()[0]
    return (line.partition("] ")[2] if line.startswith("[/") else line).partition(". This is typically")[0]
