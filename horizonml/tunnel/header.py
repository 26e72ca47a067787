"""The first bytes on a tunnel's connection: who is wanted at the other machine, and the answer."""

from __future__ import annotations

import enum
import socket
import struct
from dataclasses import dataclass

from horizonml.tunnel.addresses import is_ours

_LAYOUT = struct.Struct(">4sBB4sH")
_MAGIC, _VERSION, _PLAIN = b"hzml", 1, 1
HEADER_BYTES = _LAYOUT.size


class Answer(enum.IntEnum):
    """What the other machine answers, one byte."""

    CONNECTED = 0
    NOBODY = 1
    FULL = 2

    @property
    def words(self) -> str:
        """Return it for people."""
        match self:
            case Answer.CONNECTED:
                return "connected"
            case Answer.NOBODY:
                return "no rank of that machine's user listens there (any more)"
        return "that machine carries as many connections as it can"


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
