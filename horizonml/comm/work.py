"""Waits for messages and sums that are under way, no longer than their group lasts.

The messages that were sent to some ranks can be kept, so that the work of lost ranks can be repeated (`playback`). They
are the tensors themselves, not copies: nobody writes to an activation or a gradient after it was sent. Logging what
crosses the boundary of a failed part is the idea of SWIFT (Zhong et al., PPoPP 2023).
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from torch import Tensor

from horizonml.errors import PeerLost

T = TypeVar("T")

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


SMALL_MESSAGE = 1024
"""The most bytes of a message that arrives in one piece, or not at all."""


class Message:
    """Stands for a message that is under way, for which a rank waits no longer than its group lasts.

    When a connection breaks in the middle of a message, gloo wakes neither its sender nor its receiver before the
    group's timeout. So another thread waits for it in gloo, and is left behind where that happens.
    """

    def __init__(self, work: Any, waiters: threading.local, over: threading.Event) -> None:
        """`waiters` has, for each thread, the one that waits for it; `over` is set once the group is over."""
        self._work, self._waiters, self._over = work, waiters, over

    def wait(self) -> None:
        waiter = getattr(self._waiters, "own", None)
        if waiter is None:
            waiter = self._waiters.own = _Waiter()
        waiter.wait(self._work, self._over)


class _Waiter:
    """Waits for messages in a thread of its own, one at a time. Locks are what wakes a thread soonest."""

    def __init__(self) -> None:
        self._slot, self._stuck = _Slot(), False
        threading.Thread(target=_wait, args=(self._slot,), name="messages", daemon=True).start()
        weakref.finalize(self, self._slot.begun.release)  # without a message, which ends the thread

    def wait(self, work: Any, over: threading.Event) -> None:
        """Wait for a message. Raises PeerLost if the group is over, and what gloo raises."""
        slot = self._slot
        if not self._stuck:
            slot.work = work
            slot.begun.release()
        while not self._stuck:
            if slot.ended.acquire(timeout=WAIT_SECONDS):
                if slot.error is not None:
                    raise slot.error
                return
            self._stuck = over.is_set()
        raise PeerLost("the group was broken off")


class _Slot:
    """Takes a message to the thread that waits for it, and brings back how that ended."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Lock(), threading.Lock()  # held until there is something
        self.begun.acquire()
        self.ended.acquire()
        self.work: Any = None
        self.error: Exception | None = None


def _wait(slot: _Slot) -> None:
    while slot.begun.acquire() and (work := slot.work) is not None:
        try:
            work.wait()
            slot.error = None
        except Exception as error:  # noqa: BLE001 (it is raised where the message is awaited)
            slot.error = error
        slot.work = work = None  # or it would keep the message until the next one comes
        slot.ended.release()


class SumChain:
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

    def wait(self, timeout: timedelta | None = None) -> None:
        return None


class Deferred(Done):
    """Stands for work that is done when it is waited for: once, and by one thread."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work

    def wait(self, timeout: timedelta | None = None) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


def in_thread(action: Callable[[], T], name: str) -> Future[T]:
    """Run an action in a thread of its own, which ends with the process, and return what it will come to."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(action())
        except BaseException as error:  # noqa: BLE001  (who asks for the result gets it)
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


class Naming:
    """Raises PeerLost, which names the peer if it is known, instead of gloo's errors; cheaper than a generator."""

    def __init__(self, name: Callable[[int], str], peer: int | None) -> None:
        self._name, self._peer = name, peer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, GLOO_ERRORS):
            who = "a peer" if self._peer is None else self._name(self._peer)
            timed_out = "Timed out" in str(error)
            reason = "did not answer in time" if timed_out else "closed its connection"
            raise PeerLost(f"{who} {reason} ({short(error)})", timed_out=timed_out) from error


def short(error: Exception) -> str:
    """Return gloo's message without the place in its source and its advice."""
    line = str(error).strip().splitlines()[0]
    return (line.partition("] ")[2] if line.startswith("[/") else line).partition(". This is typically")[0]


class MessageLog:
    """Holds, for each of some receivers, what this rank has sent to it in the latest steps."""

    def __init__(self, receivers: Iterable[int], tags: Container[int], most_bytes: int) -> None:
        """Log messages with these tags to these ranks; drop the oldest steps above `most_bytes` bytes."""
        self._receivers, self._tags, self._most = frozenset(receivers), tags, most_bytes
        self._steps: dict[int, dict[int, dict[int, Tensor]]] = defaultdict(dict)  # step -> receiver -> tag -> message
        self._bytes: dict[int, int] = {}  # of each step
        self._now: int | None = None

    def begin(self, step: int) -> None:
        """Log what is sent from now on as part of a step."""
        self._now = step
        self._steps[step], self._bytes[step] = {}, 0

    def pause(self) -> None:
        """Stop logging, for example during an evaluation."""
        self._now = None

    def add(self, tensor: Tensor, receiver: int, tag: int) -> None:
        """Take note of a message that is sent now."""
        if self._now is None or receiver not in self._receivers or tag not in self._tags:
            return
        self._steps[self._now].setdefault(receiver, {})[tag] = tensor
        self._bytes[self._now] += tensor.nbytes
        while sum(self._bytes.values()) > self._most and len(self._bytes) > 1:
            self.forget(min(self._bytes) + 1)

    def forget(self, step: int) -> None:
        """Drop the messages of all steps before `step`."""
        for old in [number for number in self._bytes if number < step]:
            del self._bytes[old], self._steps[old]

    @property
    def first(self) -> int | None:
        """Return the first step of which all messages are there, or None if nothing is."""
        return min(self._bytes, default=None)

    @property
    def room(self) -> int:
        """Return how many steps fit into the log, if all are like the largest one so far; at least one."""
        return max(1, self._most // max(1, *self._bytes.values(), 1))

    def messages(self, receiver: int, since: int, before: int) -> dict[tuple[int, int], Tensor]:
        """Return the messages to a receiver by step and tag, of steps `since` to `before - 1`."""
        return {
            (step, tag): tensor
            for step, receivers in self._steps.items()
            if since <= step < before
            for tag, tensor in receivers.get(receiver, {}).items()
        }
