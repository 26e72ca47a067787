"""The sign of life that a member of a formed group gives to the rendezvous service."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from torch.distributed import Store

from horizonml.machine.network import can_connect
from horizonml.rendezvous.checks import printable
from horizonml.rendezvous.mailbox import peek, post
from horizonml.rendezvous.messages import Resume, read_status

_log = logging.getLogger(__name__)
BEAT_SECONDS = 1.0


class Heartbeat(threading.Thread):
    """Shows that this rank lives, also to a service that was started anew; the lead looks for newcomers, too."""

    def __init__(
        self, address: tuple[str, int], connect: Callable[[], Store], resume: Resume, beats: int, lead: bool
    ) -> None:
        """Beat at the service at `address`, to which `connect` makes a store's client.

        `resume` tells a service that does not know this rank where it is a member. `beats` were given before.
        """
        super().__init__(name="heartbeat", daemon=True)
        self._address, self._connect, self._resume, self._beats, self._lead = address, connect, resume, beats, lead
        self._telling = threading.Lock()
        self.store = connect()
        self.stop = threading.Event()
        self.newcomers: Sequence[int] = ()

    def end(self) -> None:
        """Stop: once this returns, the service hears nothing more."""
        with self._telling:
            self.stop.set()

    def run(self) -> None:
        connected = True
        while not self.stop.wait(BEAT_SECONDS):
            try:
                if not connected:
                    # A store's client never connects again: there must be a new one, and a service to connect it to.
                    if can_connect(*self._address, timeout=BEAT_SECONDS) is not None:
                        continue
                    self.store, connected = self._connect(), True
                    _log.warning("the rendezvous service is back")
                self._beat()
            except (RuntimeError, ValueError) as error:
                if connected:
                    _log.warning(
                        "the rendezvous service is gone; training goes on without it until it is back (%s)",
                        first_line(error),
                    )
                connected = False

    def _beat(self) -> None:
        self._beats += 1
        number = self._resume.number
        self.store.set(f"beat/{number}", str(self._beats))
        status = read_status(peek(self.store, "status"))
        if self._lead:
            self.newcomers = status.newcomers
        if status.running is not None and number not in status.running:
            with self._telling:
                if not self.stop.is_set():
                    post(self.store, self._resume.to_json())


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, because PyTorch appends its stack."""
    return printable(str(error).strip().splitlines()[0]) if str(error).strip() else type(error).__name__
