"""Finds out which addresses can be reached, whether or not anything listens there."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Collection
from contextlib import suppress

Address = tuple[str, int]
_AGAIN_SECONDS = 0.5  # between two attempts, as each of them may get lost on a bad network
_ANSWERS = (errno.ECONNREFUSED, errno.ECONNRESET)


class Probe:
    """Tries to connect to some addresses until each has answered; that it refuses is an answer, too."""

    def __init__(self, addresses: Collection[Address]) -> None:
        self.addresses = frozenset(addresses)
        self.silent = set(self.addresses)  # which have not answered yet
        self._attempts: dict[socket.socket, Address] = {}
        self._next = 0.0

    def look(self) -> None:
        """Take note of answers, and try again now and then; never waits."""
        for attempt, address in list(self._attempts.items()):
            if address not in self.silent or self._is_over(attempt, address):
                del self._attempts[attempt]
                attempt.close()
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _AGAIN_SECONDS
            for address in self.silent:
                self._try(address)

    def close(self) -> None:
        """End all attempts."""
        for attempt in self._attempts:
            attempt.close()
        self._attempts.clear()

    def _try(self, address: Address) -> None:
        attempt = None
        with suppress(OSError):  # no way there, or no descriptor is left for the moment
            attempt = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
            attempt.setblocking(False)
            error = attempt.connect_ex(address)
            if error in (0, errno.EINPROGRESS):
                self._attempts[attempt] = address
                return
            if error in _ANSWERS:
                self.silent.discard(address)
        if attempt is not None:
            attempt.close()

    def _is_over(self, attempt: socket.socket, address: Address) -> bool:
        """Return whether an attempt has ended, and take note of an answer."""
        error = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not error:
            try:
                attempt.getpeername()
            except OSError:
                return False
        if not error or error in _ANSWERS:
            self.silent.discard(address)
        return True
