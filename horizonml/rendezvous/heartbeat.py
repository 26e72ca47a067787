"""The sign of life that a member of a formed group gives to the rendezvous service, and what it hears in return.

It is a thread with a connection of its own, which does nothing but beat: a step that computes, a disk that blocks or a
collective that waits does not hold it up, because all of them release the interpreter's lock. A garbage collection
does not release it, but takes seconds only beyond tens of millions of objects.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch.distributed import Store

from horizonml.machine.network import can_connect
from horizonml.rendezvous.checks import printable
from horizonml.rendezvous.line import Line
from horizonml.rendezvous.mailbox import peek, post
from horizonml.rendezvous.messages import Ended, Resume, Status, read_ended, read_status

_log = logging.getLogger(__name__)
BEAT_SECONDS = 0.25
_MOST_DOUBLINGS = 3  # of the time between two attempts: a service that answers again must hear a beat within 5 s
_CONNECT_SECONDS = 1.0
_ANSWER_SECONDS = 2.0  # then the connection is made anew, which is quicker than TCP's own recovery

OnEnd = Callable[[Ended], object]


@dataclass(frozen=True)
class _Heard:
    """What the service says at one beat."""

    status: Status
    ended: Ended | None  # how the generation has ended, unless that was known before


class Heartbeat(threading.Thread):
    """Shows that this rank lives, also to a service that was started anew, and learns when its generation is over.

    The lead looks for newcomers, too.
    """

    def __init__(
        self, address: tuple[str, int], connect: Callable[[], Store], resume: Resume, beats: int, lead: bool
    ) -> None:
        """Beat at the service at `address`, to which `connect` makes a store's client.

        `resume` tells a service that does not know this rank where it is a member. `beats` were given before.
        """
        super().__init__(name="heartbeat", daemon=True)
        self._address, self._connect, self._resume, self._beats, self._lead = address, connect, resume, beats, lead
        self._telling = threading.Lock()
        self._callbacks: list[OnEnd] = []
        self._said: set[int] = set()  # joins that are held back, which was reported already
        self.line = Line(connect)
        self.stop = threading.Event()
        self.newcomers: Sequence[int] = ()
        self.ended: Ended | None = None

    def on_end(self, callback: OnEnd) -> None:
        """Call this once when the generation is over; at once if it is already."""
        with self._telling:
            if self.ended is None:
                self._callbacks.append(callback)
                return
        callback(self.ended)

    def end(self) -> None:
        """Stop: once this returns, the service hears nothing more, and nothing is called."""
        with self._telling:
            self.stop.set()
            self._callbacks.clear()

    def run(self) -> None:
        connected, failed = True, 0
        while not self.stop.is_set():
            try:
                if not connected:
                    # A store's client never connects again: there must be a new one, and a service to connect it to.
                    if can_connect(*self._address, timeout=_CONNECT_SECONDS) is not None:
                        self.stop.wait(BEAT_SECONDS)
                        continue
                    self.line.close()
                    self.line = Line(self._connect)
                self._beats += 1
                heard = self.line.ask(self._beat, _ANSWER_SECONDS)
                if not connected:
                    connected = True
                    _log.warning("the rendezvous service is back")
                self._act(heard)
            except (RuntimeError, ValueError) as error:
                if connected and not self.stop.is_set():
                    _log.warning(
                        "the rendezvous service does not answer; training goes on without it until it is back (%s)",
                        first_line(error),
                    )
                # A listener that stays mute costs a thread each time, so it is tried ever less often.
                connected, failed = False, failed + 1
            else:
                failed = 0
            self.stop.wait(BEAT_SECONDS * 2 ** min(failed, _MOST_DOUBLINGS))

    def _beat(self, store: Store) -> _Heard:
        """Beat, and return what the service says; in the line's thread."""
        number, generation = self._resume.number, self._resume.fingerprint.generation
        store.set(f"beat/{number}", str(self._beats))
        status = read_status(peek(store, "status"))
        # The service publishes the end of a generation before the status that no longer names its members.
        message = peek(store, f"over/{generation}") if self.ended is None else None
        if message is None:
            return _Heard(status, None)
        return _Heard(status, replace(read_ended(message), evicted=peek(store, f"gone/{number}") is not None))

    def _act(self, heard: _Heard) -> None:
        """Do what follows from what the service says."""
        status, number = heard.status, self._resume.number
        if self._lead:
            self.newcomers = status.newcomers
            for held in status.held:
                if held.number not in self._said:
                    self._said.add(held.number)
                    _log.warning("%s", held.reason)
        if heard.ended is not None:
            self._tell(heard.ended)
        elif self.ended is None and status.running is not None and number not in status.running:
            with self._telling:
                if not self.stop.is_set():
                    self.line.ask(lambda store: post(store, self._resume.to_json()), _ANSWER_SECONDS)

    def _tell(self, ended: Ended) -> None:
        """Let everyone know who has asked to."""
        with self._telling:
            if self.stop.is_set():
                return
            self.ended = ended
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(ended)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, because PyTorch appends its stack."""
    return printable(str(error).strip().splitlines()[0]) if str(error).strip() else type(error).__name__
