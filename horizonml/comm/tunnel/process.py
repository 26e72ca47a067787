"""The side process of a rank: `python -m horizonml.comm.tunnel.process`, which the rank tells what to do.

Requests and replies are lines of JSON on the socket that is its standard input; the first one brings the token. When
the rank ends, the process lets go of the machine's port at once, and ends with the last connection that it carries.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from horizonml.comm.tunnel.addresses import Target
from horizonml.comm.tunnel.carrier import Carrier
from horizonml.comm.tunnel.ends import READ, Loop
from horizonml.security.token import parse_token

_MOST_LINE = 64 << 10  # bytes
Fields = dict[str, Any]


class Control:
    """Does what the rank asks for."""

    def __init__(self, loop: Loop, line: socket.socket) -> None:
        """Listen to the rank on a connected socket."""
        self._loop, self._line, self._unread = loop, line, b""
        self._carrier: Carrier | None = None
        self._encrypt, self._rank = True, 0
        self.over = False
        line.setblocking(False)
        loop.watch(line, READ, lambda _: self._hear())

    @property
    def busy(self) -> bool:
        """Return whether connections are carried, of which other ranks of this machine may have one end."""
        return self._carrier is not None and self._carrier.busy

    def look(self) -> None:
        """Notice that the rank has ended, although processes that it has left behind may hold its end of the line."""
        if not self.over and self._rank and os.getppid() != self._rank:
            self._end()

    def _hear(self) -> None:
        try:
            more = self._line.recv(_MOST_LINE)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        self._unread += more
        if not more or len(self._unread) > _MOST_LINE:
            self._end()
            return
        while b"\n" in self._unread:
            line, _, self._unread = self._unread.partition(b"\n")
            self._reply(json.loads(line))

    def _reply(self, request: Fields) -> None:
        """Do what a request says, and answer it."""
        deeds: dict[str, Callable[[Fields], Fields]] = {
            "begin": self._begin,
            "serve": self._serve,
            "open": self._open,
            "state": self._state,
            "close": self._close,
            "stats": self._stats,
        }
        try:
            reply = deeds[request["do"]](request)
        except OSError as error:
            reply = {"error": error.strerror or str(error)}
        # Replies are short, and the rank waits for each before it asks for more.
        self._line.setblocking(True)
        try:
            self._line.sendall(json.dumps(reply).encode() + b"\n")
        except OSError:
            self._end()
            return
        self._line.setblocking(False)

    def _begin(self, request: Fields) -> Fields:
        self._encrypt, self._rank = bool(request["encrypt"]), int(request["rank"])
        self._carrier = Carrier(self._loop, parse_token(request["token"]), self._encrypt)
        return {}

    @property
    def _active(self) -> Carrier:
        assert self._carrier is not None, "the first request brings the token"
        return self._carrier

    def _serve(self, request: Fields) -> Fields:
        self._active.serve(request["address"], request["port"])
        return {}

    def _open(self, request: Fields) -> Fields:
        target = Target(request["target"], request["target_port"], not self._encrypt)
        number, (address, port) = self._active.open(request["host"], request["port"], request["stand_in"], target)
        return {"number": number, "address": address, "port": port}

    def _state(self, request: Fields) -> Fields:
        states = [self._active.state_of(number) for number in request["numbers"]]
        return {"serving": [self._active.serving, self._active.reason], "states": states}

    def _close(self, request: Fields) -> Fields:
        for number in request["numbers"]:
            self._active.close(number)
        return {}

    def _stats(self, _: Fields) -> Fields:
        carrier = self._active
        return {
            "sent": carrier.sent,
            "received": carrier.received,
            "seconds": time.process_time(),
            "connections": carrier.pipes,
            "refused": carrier.refused,
            "cipher": carrier.cipher if self._encrypt else "none",
        }

    def _end(self) -> None:
        self.over = True
        self._loop.close(self._line)
        if self._carrier is not None:
            self._carrier.end()


def main() -> None:
    """Run until the rank has ended, and all connections with it."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="tunnel: %(message)s")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop = Loop()
    control = Control(loop, socket.socket(fileno=os.dup(0)))
    while not control.over or control.busy:
        loop.turn()
        control.look()


if __name__ == "__main__":
    main()
