"""Reaches devices in other networks through a relay: a host that all of them can connect to (`horizonml relay`).

Each device that uses a relay has an address that exists in no network, from 198.18.0.0/15 (RFC 2544), by which the
others of its room know it. A room is a name that only those who have the token can derive. What connects to such an
address asks the relay for that device, and speaks through it as through a cable: TLS and all else is between the two.
Where the relay sees two devices behind one address, they may be on one network; then the way is tried without it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

RELAY = "HORIZONML_RELAY"  # what this process and those that it starts use: HOST:PORT, the room, and the own address
PORT = 29410
PAIRING_ROOM = "pairing"  # in which a device that offers codes has the address of their number
MOST_LINE = 4096  # bytes
_NETWORK = ipaddress.ip_network("198.18.0.0/15")
_NEAR_SECONDS = 0.4  # for a device on the same network to say who it is
_KEPT_SECONDS = 30.0  # for which it is remembered whether there is a way without the relay
Fields = dict[str, object]
# The way to each device: its address on this network, or None if it has none there, and until when that is remembered.
_ways: dict[str, tuple[str | None, float]] = {}


@dataclass(frozen=True)
class Relay:
    """The relay that this process uses, and who this device is there."""

    host: str
    port: int
    room: str
    own: str  # address

    def __str__(self) -> str:
        """Return it as the environment variable has it."""
        return f"{self.host} {self.port} {self.room} {self.own}"


@contextmanager
def through(relay: Relay) -> Iterator[None]:
    """Let this process, and those that it starts meanwhile, use a relay."""
    os.environ[RELAY] = str(relay)
    try:
        yield
    finally:
        os.environ.pop(RELAY, None)


def address_in(number: int) -> str:
    """Return an address by which a device can be known at a relay; there are 131,072."""
    return str(_NETWORK[number % _NETWORK.num_addresses])


def used() -> Relay | None:
    """Return the relay that this process uses, if it uses one."""
    words = os.environ.get(RELAY, "").split()
    return Relay(words[0], int(words[1]), words[2], words[3]) if len(words) == 4 and words[1].isdecimal() else None


def is_relayed(host: str) -> bool:
    """Return whether an address is that of a device at the relay of this process."""
    with suppress(ValueError):
        return ipaddress.ip_address(host) in _NETWORK and used() is not None
    return False


def bound(host: str) -> str:
    """Return the address at which to listen so that this device is reached at `host`."""
    return "0.0.0.0" if is_relayed(host) else host  # noqa: S104  (whoever connects must show the token)


def connect(host: str, port: int, seconds: float) -> socket.socket:
    """Return a connection to an address, through the relay if it is one of those there. Raises OSError."""
    relay = used()
    if relay is None or not is_relayed(host):
        return socket.create_connection((host, port), seconds)
    until = time.monotonic() + seconds
    if host == relay.own:
        return socket.create_connection(("127.0.0.1", port), seconds)
    near = _near(relay, host, seconds)
    if near is not None:
        with suppress(OSError):
            return socket.create_connection((near, port), seconds)
        _ways.pop(host, None)
    request: Fields = {"do": "dial", "room": relay.room, "to": host, "port": port}
    return ask((relay.host, relay.port), request, max(0.1, until - time.monotonic()))[0]


def ask(relay: tuple[str, int], request: Fields, seconds: float) -> tuple[socket.socket, Fields]:
    """Return a connection to a relay, and its answer to a request. Raises OSError if it refuses, or does not answer."""
    connection = socket.create_connection(relay, seconds)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(read_line(connection))
        if not isinstance(answer, dict):
            raise OSError("the relay answers with something else")
        if "error" in answer:
            raise ConnectionRefusedError(f"the relay says: {str(answer['error'])[:200]}")
    except ValueError as error:
        connection.close()
        raise OSError(f"{relay[0]}:{relay[1]} is no relay") from error
    except BaseException:
        connection.close()
        raise
    return connection, answer


def query(relay: tuple[str, int], request: Fields, seconds: float) -> Fields:
    """Return the answer of a relay to a request that ends with it. Raises OSError."""
    connection, answer = ask(relay, request, seconds)
    connection.close()
    return answer


def read_line(connection: socket.socket) -> bytes:
    """Return a line, and read nothing that comes after it. Raises OSError."""
    line = bytearray()
    while len(line) < MOST_LINE:
        more = connection.recv(1)
        if not more:
            raise ConnectionResetError("it closed the connection")
        if more == b"\n":
            return bytes(line)
        line += more
    raise OSError("it sends too long a line")


def _near(relay: Relay, host: str, seconds: float) -> str | None:
    """Return the address of a device on this network, or None if it is elsewhere."""
    known, until = _ways.get(host, (None, 0.0))
    if time.monotonic() < until:
        return known
    answer = query((relay.host, relay.port), {"do": "where", "room": relay.room, "of": host}, seconds)
    near, port = answer.get("near"), answer.get("port")
    found = None
    if answer.get("beside") is True and isinstance(near, list) and isinstance(port, int):
        found = next((str(one) for one in near[:8] if _is_there(str(one), port, host)), None)
    _ways[host] = found, time.monotonic() + _KEPT_SECONDS
    return found


def _is_there(address: str, port: int, host: str) -> bool:
    """Return whether a device on this network says that it is the one that is meant."""
    with suppress(OSError, ValueError), socket.create_connection((address, port), _NEAR_SECONDS) as probe:
        probe.settimeout(_NEAR_SECONDS)
        return read_line(probe) == host.encode()
    return False
