"""The two ends of what a tunnel carries: a rank's own socket, and the encrypted one to another machine."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TypeVar

from horizonml.tunnel.loop import READ, WRITE, Wait

T = TypeVar("T")
_CHUNK = 128 << 10  # bytes that are carried at a time, and at most kept for an end that is slower
_MOST_HANDSHAKE = 64 << 10  # bytes, of which a handshake takes about 2,000

# One thread carries everything, so that all connections share these.
_raw = memoryview(bytearray(_CHUNK))
_clear = memoryview(bytearray(_CHUNK + (32 << 10)))  # and a record that had begun to arrive before


class PlainEnd:
    """Carries bytes as they are."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connected socket."""
        self.socket = connection

    def read(self) -> memoryview | None:
        """Return what has come, valid until the next call at any end; nothing at the end; None if nothing has come.

        Raises OSError.
        """
        try:
            return _raw[: self.socket.recv_into(_raw)]
        except BlockingIOError:
            return None

    def seal(self, content: memoryview) -> memoryview:
        """Return what to send for this content."""
        return content

    def farewell(self) -> memoryview:
        """Return what to send at the end."""
        return memoryview(b"")


class SecureEnd:
    """Carries bytes through TLS or, once both sides have left it, as they are."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, server_side: bool) -> None:
        """Take over a connected socket, of which the handshake is to come."""
        self.socket = connection
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side)
        self._plain, self._early = False, b""
        self._total = 0  # bytes that have come during the handshake

    def handshake(self) -> Generator[Wait, None, None]:
        """Shake hands. Raises OSError, and ssl.SSLError if the other side does not have the token."""
        yield from self._until(self._tls.do_handshake)

    def receive(self, size: int) -> Generator[Wait, None, bytes]:
        """Receive exactly so many bytes. Raises OSError."""
        content = b""
        for _ in range(size):  # of a few bytes
            more = yield from self._until(lambda: self._tls.read(1))
            if not more:
                raise ConnectionResetError("the connection was closed")
            content += more
        return content

    def send(self, content: bytes) -> Generator[Wait, None, None]:
        """Send a few bytes. Raises OSError."""
        self._tls.write(content)
        yield from self._flush()

    def leave_tls(self) -> Generator[Wait, None, None]:
        """Go on without TLS, as the other side does. Raises OSError."""
        yield from self._until(self._tls.unwrap)
        self._plain, self._early = True, self._arrived.read()

    @property
    def cipher(self) -> str:
        """Return the name of the cipher."""
        return (self._tls.cipher() or ("none",))[0]

    def read(self) -> memoryview | None:
        """Return what has come, as `PlainEnd.read` does. Raises OSError, also if it was altered or cut off."""
        if self._plain and self._early:
            early, self._early = memoryview(self._early), b""
            return early
        try:
            size = self.socket.recv_into(_raw)
        except BlockingIOError:
            if self._plain:
                return None
        else:
            if self._plain:
                return _raw[:size]
            if size:
                self._arrived.write(_raw[:size])
            else:
                self._arrived.write_eof()
        found = 0
        try:
            while found < len(_clear) and (more := self._tls.read(len(_clear) - found, _clear[found:])):
                found += int(more)
        except ssl.SSLWantReadError:
            return _clear[:found] if found else None
        except ssl.SSLZeroReturnError:
            pass  # the other side has said that this is the end
        return _clear[:found]

    def seal(self, content: memoryview) -> memoryview:
        """Return what to send for this content. Raises OSError."""
        if self._plain:
            return content
        at = 0
        while at < len(content):
            at += self._tls.write(content[at:])
        return memoryview(self._leaving.read())

    def farewell(self) -> memoryview:
        """Return what to send at the end."""
        if self._plain:
            return memoryview(b"")
        with suppress(ssl.SSLError):  # it wants an answer, for which nobody waits
            self._tls.unwrap()
        return memoryview(self._leaving.read())

    def _until(self, action: Callable[[], T]) -> Generator[Wait, None, T]:
        """Return what `action` returns once enough has come for it. Raises OSError."""
        while True:
            try:
                result = action()
            except ssl.SSLWantReadError:
                yield from self._flush()
            except ssl.SSLError:
                yield from self._flush()  # so that the other side learns the reason
                raise
            else:
                yield from self._flush()
                return result
            yield self.socket, READ
            try:
                more = self.socket.recv(16 << 10)
            except BlockingIOError:
                continue
            self._total += len(more)
            if self._total > _MOST_HANDSHAKE:
                raise ConnectionResetError("the handshake is too long")
            if not more:  # which is an error of its own in some releases of OpenSSL, and in others none
                raise ConnectionResetError("it closed the connection")
            self._arrived.write(more)

    def _flush(self) -> Generator[Wait, None, None]:
        """Send what TLS has to say. Raises OSError."""
        left = memoryview(self._leaving.read())
        while left:
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                yield self.socket, WRITE
