"""Reads and rewrites the address that gloo publishes for a rank.

gloo publishes a length and the host's name, a length and the address, and a number for each of its connections. The
address is a `sockaddr_storage` of the kernel's, followed by a sequence number.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

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
