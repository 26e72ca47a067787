"""Defines the addresses of tunnels: how gloo publishes a rank's address, and how a tunnel names the wanted rank.

On Linux, each rank has loopback addresses, and the kernel says who listens at one and who has connected from one. In
the portable mode, which other systems have by themselves, all ranks are at one loopback address, and other users of
the same machine are not kept out.

gloo publishes a length and the host's name, a length and the address, and a number for each of its connections. The
address is a `sockaddr_storage` of the kernel's, followed by a sequence number. The first bytes on a tunnel's connection
name the rank that is wanted at the other machine, and the answer says whether it was reached.
"""

from __future__ import annotations

import enum
import errno
import hashlib
import hmac
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from horizonml.files import own_temporary
from horizonml.security.token import Token

NETWORK = IPv4Network("127.64.0.0/10")  # part of the loopback network, which never leaves a machine
_LISTEN, _CONNECTED = 0x0A, (0x01, 0x02)  # states of TCP: established, and about to be
_TABLE = Path("/proc/net/tcp")
PORTABLE = "HORIZONML_PORTABLE"
_LOOPBACK, _ABOVE = "127.0.0.1", "127.0.0.2"  # the one that every system has, and a greater one
_LOWEST_PORT = 1024


def is_portable(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether to do without the loopback addresses and the lists of sockets that only Linux has."""
    return sys.platform != "linux" or env.get(PORTABLE) == "1"


def own_address(rank: int) -> str:
    """Return the loopback address at which a rank of a group listens."""
    return _LOOPBACK if is_portable() else str(NETWORK[2 * rank + 2])


def probe_address() -> str:
    """Return a loopback address for a listener that belongs to no rank."""
    return _LOOPBACK if is_portable() else str(NETWORK[-2])


def is_address_of(address: str | None, rank: int) -> bool:
    """Return whether a rank on another machine, with or without the portable mode, may listen at this address."""
    return address in (_LOOPBACK, str(NETWORK[2 * rank + 2]))


def stand_in_address(rank: int, connects_here: bool) -> str:
    """Return the loopback address that stands for a rank on another machine.

    Of two ranks, gloo lets the one with the greater address connect to the other, and each compares its own address
    with what it believes to be the other's. Both come to the same result, because this address lies between those of
    the rank and its successor. In the portable mode, it is greater than any rank's own if the other one
    `connects_here`; else the ports decide, see `stand_in`.
    """
    if is_portable():
        return _ABOVE if connects_here else _LOOPBACK
    return str(NETWORK[2 * rank + 3])


def stand_in(address: str, own_port: int) -> socket.socket:
    """Return a socket that listens at a stand-in's address.

    Where this is the address of the rank itself, which listens at `own_port`, it has a port that gloo takes for a
    smaller one, so that it lets the rank connect to it. gloo compares ports as they lie in memory, in the byte order of
    the network. Raises OSError.
    """
    if address != _LOOPBACK:
        return socket.create_server((address, 0), backlog=4)
    for port in range((1 << 16) - 1, _LOWEST_PORT, -1):
        if socket.htons(port) < socket.htons(own_port):
            with suppress(OSError):
                return socket.create_server((address, port), backlog=4)
    raise OSError(errno.EADDRINUSE, f"no port that gloo takes for smaller than {own_port} is free")


def is_ours(address: str) -> bool:
    """Return whether a tunnel may lead to this address."""
    if is_portable():
        return address == _LOOPBACK
    try:
        return IPv4Address(address) in NETWORK
    except ValueError:
        return False


def vouch(token: Token, address: str, port: int) -> ExitStack:
    """Let tunnels with this token lead to a rank's listener, until what is returned is closed.

    Other runs of the same user have other tokens, and whoever has theirs must not reach this one's listeners. It is a
    socket with a name in the kernel only, which nobody can find without the token before it is there; in the portable
    mode, with a file in a folder of this user's. Raises OSError.
    """
    name = _voucher(token, address, port)
    with ExitStack() as held:
        voucher = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        if is_portable():
            Path(os.fsdecode(name)).unlink(missing_ok=True)  # of a process that was killed
            held.callback(Path(os.fsdecode(name)).unlink, missing_ok=True)
        voucher.bind(name)
        return held.pop_all()


def is_vouched_for(token: Token, address: str, port: int) -> bool:
    """Return whether a process with this token has vouched for a listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(_voucher(token, address, port)) == 0


def _voucher(token: Token, address: str, port: int) -> bytes:
    """Return the name of the socket that vouches for a listener; names that begin with a zero are in no folder."""
    proof = hmac.new(token.secret, f"horizonml listener {address}:{port}".encode(), hashlib.sha256).hexdigest()
    if is_portable():
        return os.fsencode(own_temporary() / proof[:24])  # a system may take no more than 103 bytes in all
    return b"\0horizonml-" + proof[:40].encode()


@dataclass(frozen=True)
class Entry:
    """Describes a socket as the kernel lists it."""

    local: tuple[str, int]
    remote: tuple[str, int]
    state: int
    user: int


def entries(table: str, port: int | None = None) -> Iterator[Entry]:
    """Yield the sockets of a table in the format of /proc/net/tcp; lines that are not understood are left out.

    With a port, only the sockets that have it at one of their ends: a busy machine has thousands of others.
    """
    named = "" if port is None else f":{port:04X}"
    for line in table.splitlines()[1:]:
        if named not in line:
            continue
        words = line.split()
        try:
            yield Entry(_endpoint(words[1]), _endpoint(words[2]), int(words[3], 16), int(words[7]))
        except (IndexError, ValueError):
            continue


def _endpoint(text: str) -> tuple[str, int]:
    """Return an address and a port, which the kernel writes in the byte order of the processor."""
    address, _, port = text.partition(":")
    return socket.inet_ntoa(int(address, 16).to_bytes(4, sys.byteorder)), int(port, 16)


def listener_of(table: str, address: str, port: int) -> int | None:
    """Return the user whose socket listens at exactly this address, or None if there is none."""
    found = (one.user for one in entries(table, port) if one.state == _LISTEN and one.local == (address, port))
    return next(found, None)


def connected_from(table: str, source: tuple[str, int], target: tuple[str, int]) -> int | None:
    """Return the user whose socket has connected from `source` to `target`, or None if there is none."""
    ends = source, target
    sockets = entries(table, target[1])
    found = (one.user for one in sockets if one.state in _CONNECTED and (one.local, one.remote) == ends)
    return next(found, None)


def others_connected(table: str, target: tuple[str, int], user: int) -> bool:
    """Return whether a socket of another user than this one is connected to `target`."""
    sockets = entries(table, target[1])
    return any(one.remote == target and one.state in _CONNECTED and one.user != user for one in sockets)


def kernel_table() -> str:
    """Return the kernel's list of this network namespace's TCP sockets. Raises OSError."""
    return _TABLE.read_text(encoding="ascii", errors="replace")


_LAYOUT = struct.Struct(">4sBB4sH")
_MAGIC, _VERSION, _PLAIN = b"hzml", 1, 1
HEADER_BYTES = _LAYOUT.size


class TunnelAnswer(enum.IntEnum):
    """What the other machine answers, one byte."""

    CONNECTED = 0
    NOBODY = 1
    FULL = 2

    @property
    def words(self) -> str:
        """Return for people why no connection came about."""
        full = "that machine carries as many connections as it can"
        return full if self is TunnelAnswer.FULL else "no rank of that machine's user listens there (any more)"


@dataclass(frozen=True)
class Target:
    """Names a rank's listening socket at the other machine; `plain` asks for plain bytes after the handshake."""

    address: str
    port: int
    plain: bool

    def to_bytes(self) -> bytes:
        """Return what is sent."""
        return _LAYOUT.pack(_MAGIC, _VERSION, _PLAIN * self.plain, socket.inet_aton(self.address), self.port)

    @classmethod
    def from_bytes(cls, content: bytes) -> Target:
        """Return what `to_bytes` was made of. Raises ValueError."""
        if len(content) != HEADER_BYTES:
            raise ValueError(f"a header has {HEADER_BYTES} bytes, not {len(content)}")
        magic, version, flags, packed, port = _LAYOUT.unpack(content)
        address = socket.inet_ntoa(packed)
        if magic != _MAGIC or version != _VERSION or flags & ~_PLAIN or port == 0 or not is_ours(address):
            raise ValueError("a header that no tunnel sends")
        return cls(address, port, bool(flags & _PLAIN))


_LENGTH = struct.Struct("<Q")
_FAMILY = struct.Struct("=H")  # in the byte order of the processor
_PORT = struct.Struct(">H")
_STORAGE = 128  # bytes of a sockaddr_storage
_MOST_NAME = 255
MOST_BLOB = 1 << 20  # bytes: the connections of 100,000 ranks


@dataclass(frozen=True)
class Published:
    """Holds what gloo has published for a rank, and where the address stands in it."""

    blob: bytes
    at: int

    @property
    def family(self) -> int:
        """Return the family of the address, as `socket` numbers it."""
        return int(_FAMILY.unpack_from(self.blob, self.at)[0])

    @property
    def port(self) -> int:
        """Return the port of the listening socket."""
        return int(_PORT.unpack_from(self.blob, self.at + 2)[0])

    @property
    def address(self) -> str | None:
        """Return the address in version 4 of the protocol, or None if it is of another kind."""
        return socket.inet_ntoa(self.blob[self.at + 4 : self.at + 8]) if self.family == socket.AF_INET else None

    def moved(self, address: str, port: int) -> bytes:
        """Return the same with another IPv4 address and port."""
        target = _PORT.pack(port) + socket.inet_aton(address)
        return self.blob[: self.at + 2] + target + self.blob[self.at + 8 :]


def read_blob(blob: bytes) -> Published:
    """Find the address in what gloo has published. Raises ValueError if it is something else."""
    if not _LENGTH.size <= len(blob) <= MOST_BLOB:
        raise ValueError(f"{len(blob)} bytes are not an address of gloo's")
    (name,) = _LENGTH.unpack_from(blob)
    at = 2 * _LENGTH.size + name
    if name > _MOST_NAME or len(blob) < at + _STORAGE:
        raise ValueError("an address of gloo's is damaged: its name is longer than it can be")
    (length,) = _LENGTH.unpack_from(blob, at - _LENGTH.size)
    if not _STORAGE <= length <= len(blob) - at:
        raise ValueError("an address of gloo's is damaged: its length cannot be")
    return Published(bytes(blob), at)
