"""The sign of life that a member of a formed group gives to the rendezvous service, old or new."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import Store

from horizonml.machine.network import can_connect
from horizonml.rendezvous.fingerprint import MOST_RANKS
from horizonml.rendezvous.mailbox import parse, peek, post, printable

_log = logging.getLogger(__name__)
BEAT_SECONDS = 1.0
_MOST_STATUS = 1 << 18  # bytes, which the ranks of the largest world take


class Heartbeat(threading.Thread):
    """Shows that this rank lives, also to a service that was started anew; the lead looks for newcomers."""

    def __init__(
        self, address: tuple[str, int], connect: Callable[[], Store], resume: dict[str, Any], beats: int, lead: bool
    ) -> None:
        """`resume` tells a service that does not know this rank where it is a member."""
        super().__init__(name="heartbeat", daemon=True)
        self._address, self._connect, self._resume, self._beats, self._lead = address, connect, resume, beats, lead
        self._telling = threading.Lock()
        self.store = connect()
        self.stop = threading.Event()
        self.newcomers: list[int] = []

    def end(self) -> None:
        """Fall silent: nothing is told any more once this returns."""
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
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                if connected:
                    _log.warning(
                        "the rendezvous service is gone; training goes on without it until it is back (%s)",
                        first_line(error),
                    )
                connected = False

    def _beat(self) -> None:
        self._beats += 1
        number = self._resume["id"]
        self.store.set(f"beat/{number}", str(self._beats))
        status = read_status(self.store)
        if self._lead:
            self.newcomers = ranks_in(status.get("newcomers"))
        running = status.get("running")
        if isinstance(running, list) and number not in running:
            with self._telling:
                if not self.stop.is_set():
                    post(self.store, self._resume)


def read_status(store: Store) -> dict[str, Any]:
    """Return what the service says to all; nothing if it has just begun, or if a stranger has written over it.

    The service writes it anew four times a second.
    """
    try:
        return parse(peek(store, "status") or b"{}", _MOST_STATUS)
    except ValueError:
        return {}


def ranks_in(value: object) -> list[int]:
    """Return the ranks in a list from the network."""
    ranks = value if isinstance(value, list) else []
    return [rank for rank in ranks[:MOST_RANKS] if type(rank) is int and 0 <= rank < MOST_RANKS]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text: PyTorch adds its stack."""
    return printable(str(error).strip().splitlines()[0]) if str(error).strip() else type(error).__name__
