"""The side process of a rank: `python -m horizonml.comm.tunnel.process`, which the rank tells what to do.

Requests and replies are lines of JSON on the socket that is its standard input; the first one brings the token. When
the rank ends, the process lets go of the machine's port at once, and ends with the last connection that it carries.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import socket
import sys
import time
from typing import Any

from horizonml.comm.tunnel.addresses import Target
from horizonml.comm.tunnel.carrier import Carrier
from horizonml.security.token import parse_token

_MOST_LINE = 64 << 10  # bytes
_LOOK_SECONDS = 0.25  # between two looks at whether the rank, or the last connection, has ended
Fields = dict[str, Any]


class Control:
    """Does what the rank asks for."""

    def __init__(self) -> None:
        self._carrier: Carrier | None = None
        self._encrypt, self._rank = True, 0

    @property
    def busy(self) -> bool:
        """Return whether connections are carried, of which other ranks of this machine may have one end."""
        return self._carrier is not None and self._carrier.busy

    async def obey(self, line: socket.socket) -> None:
        """Answer the rank's requests on a connected socket until the rank has ended."""
        reader, writer = await asyncio.open_connection(sock=line, limit=_MOST_LINE)
        watching = asyncio.create_task(self._watch_rank(reader))
        try:
            while request := await reader.readline():
                writer.write(json.dumps(self._reply(json.loads(request))).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError):  # the rank is gone, or the line is too long
            pass
        finally:
            watching.cancel()
            writer.close()
            if self._carrier is not None:
                self._carrier.end()

    async def _watch_rank(self, reader: asyncio.StreamReader) -> None:
        """Notice that the rank has ended, although processes that it has left behind may hold its end of the line."""
        while not self._rank or os.getppid() == self._rank:
            await asyncio.sleep(_LOOK_SECONDS)
        reader.feed_eof()

    def _reply(self, request: Fields) -> Fields:
        """Do what a request says, and return the answer."""
        if request["do"] == "begin":
            self._encrypt, self._rank = bool(request["encrypt"]), int(request["rank"])
            self._carrier = Carrier(parse_token(request["token"]))
            return {}
        carrier = self._carrier
        assert carrier is not None, "the first request brings the token"
        try:
            match request["do"]:
                case "serve":
                    carrier.serve(request["address"], request["port"])
                    return {}
                case "open":
                    address, port = request["target"]
                    target = Target(address, port, not self._encrypt)
                    number, at = carrier.open(request["host"], request["port"], request["stand_in"], target)
                    return {"number": number, "at": at}
                case "state":
                    states = [carrier.state_of(number) for number in request["numbers"]]
                    return {"serving": [carrier.serving, carrier.reason], "states": states}
                case "close":
                    for number in request["numbers"]:
                        carrier.close(number)
                    return {}
                case "stats":
                    return {
                        "sent": carrier.sent,
                        "received": carrier.received,
                        "seconds": time.process_time(),
                        "connections": carrier.pipes,
                        "refused": carrier.refused,
                        "cipher": carrier.cipher if self._encrypt else "none",
                    }
        except OSError as error:
            return {"error": error.strerror or str(error)}
        raise ValueError(f"the rank asks for {request['do']}")


async def serve(line: socket.socket) -> None:
    """Run until the rank has ended, and all connections with it."""
    control = Control()
    await control.obey(line)
    while control.busy:
        await asyncio.sleep(_LOOK_SECONDS)


def main() -> None:
    """Serve the rank that has started this process."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="tunnel: %(message)s")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(serve(socket.socket(fileno=os.dup(0))))


if __name__ == "__main__":
    main()
