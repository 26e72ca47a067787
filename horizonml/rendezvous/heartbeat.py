"""The sign of life that a member of a formed group gives to the rendezvous service, and what it hears in return.

It is a thread with a connection of its own, which does nothing but beat: a step that computes, a disk that blocks or a
collective that waits does not hold it up, because all of them release the interpreter's lock. A garbage collection
does not release it, but takes seconds only beyond tens of millions of objects.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from horizonml.rendezvous.answers import Ended, Status, read_ended, read_status
from horizonml.rendezvous.checks import printable
from horizonml.rendezvous.client import Endpoint, ServiceError
from horizonml.rendezvous.contact import ANSWER_SECONDS, Contact
from horizonml.rendezvous.messages import Resume

_log = logging.getLogger(__name__)
BEAT_SECONDS = 0.25

OnEnd = Callable[[Ended], object]


class Heartbeat(threading.Thread):
    """Shows that this rank lives, also to a service that was started anew, and learns when its generation is over.

    The lead looks for newcomers, too.
    """

    def __init__(self, endpoint: Endpoint, resume: Resume, beats: int, lead: bool) -> None:
        """Beat at the service; `beats` were given before.

        `resume` tells a service that does not know this rank where it is a member.
        """
        super().__init__(name="heartbeat", daemon=True)
        self._contact, self._resume, self._beats, self._lead = Contact(endpoint, resume), resume, beats, lead
        self._telling = threading.Lock()
        self._callbacks: list[OnEnd] = []
        self._said: set[str] = set()  # why ranks are held back, as far as it was reported
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
        connected = True
        while not self.stop.is_set():
            try:
                self._beats += 1
                answer = self._contact.ask({"do": "beat", "count": self._beats}, ANSWER_SECONDS)
                if not connected:
                    connected = True
                    _log.warning("the rendezvous service is back")
                self._act(read_status(answer.get("status")), read_ended(answer.get("ended")))
            except (ServiceError, ValueError) as error:
                if connected and not self.stop.is_set():
                    _log.warning(
                        "the rendezvous service does not answer; training goes on without it until it is back (%s)",
                        first_line(error),
                    )
                connected = False
            self.stop.wait(BEAT_SECONDS)
        self._contact.close()

    def _act(self, status: Status, ended: Ended | None) -> None:
        """Do what follows from what the service says."""
        if self._lead:
            self.newcomers = status.newcomers
            for held in status.held:
                if held.reason not in self._said:
                    self._said.add(held.reason)
                    _log.warning("%s", held.reason)
        if ended is not None:
            self._tell(ended)
        elif self.ended is None and status.member is False:
            with self._telling:
                if not self.stop.is_set():
                    self._contact.ask(self._resume.to_json(), ANSWER_SECONDS)

    def _tell(self, ended: Ended) -> None:
        """Let everyone know who has asked to."""
        with self._telling:
            if self.stop.is_set() or self.ended is not None:
                return
            self.ended = ended
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(ended)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, because PyTorch appends its stack."""
    return printable(str(error).strip().splitlines()[0]) if str(error).strip() else type(error).__name__
