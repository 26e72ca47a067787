"""The two ends of what a tunnel carries, a rank's own socket and the encrypted one to another machine, and the pipe.

Handshakes are coroutines. A pipe has callbacks instead, which asyncio's loop calls when a socket is ready: they copy
nothing more than TLS does, and ends can be half closed, which asyncio's own streams cannot do through TLS.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
_CHUNK = 128 << 10  # bytes that are carried at a time, and at most kept for an end that is slower
_MOST_HANDSHAKE = 64 << 10  # bytes, of which a handshake takes about 2,000
_HEADER = 5  # bytes of a record's header in TLS, of which the last two are the length of what follows (RFC 8446, 5.1)

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
        self._missing, self._header = 0, b""  # of the record that has begun to come
        self._least = 1  # bytes for which the kernel wakes this process

    async def handshake(self) -> None:
        """Shake hands. Raises OSError, and ssl.SSLError if the other side does not have the token."""
        await self._until(self._tls.do_handshake)

    async def receive(self, size: int) -> bytes:
        """Receive exactly so many bytes. Raises OSError."""
        content = b""
        for _ in range(size):  # of a few bytes
            more = await self._until(lambda: self._tls.read(1))
            if not more:
                raise ConnectionResetError("the connection was closed")
            content += more
        return content

    async def send(self, content: bytes) -> None:
        """Send a few bytes. Raises OSError."""
        self._tls.write(content)
        await self._flush()

    async def leave_tls(self) -> None:
        """Go on without TLS, as the other side does. Raises OSError."""
        await self._until(self._tls.unwrap)
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
                self._take(_raw[:size])
                self._await_record()
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

    async def _until(self, action: Callable[[], T]) -> T:
        """Return what `action` returns once enough has come for it. Raises OSError."""
        while True:
            try:
                result = action()
            except ssl.SSLWantReadError:
                await self._flush()
            except ssl.SSLError:
                await self._flush()  # so that the other side learns the reason
                raise
            else:
                await self._flush()
                return result
            more = await asyncio.get_running_loop().sock_recv(self.socket, 16 << 10)
            self._total += len(more)
            if self._total > _MOST_HANDSHAKE:
                raise ConnectionResetError("the handshake is too long")
            if not more:  # which is an error of its own in some releases of OpenSSL, and in others none
                raise ConnectionResetError("it closed the connection")
            self._take(memoryview(more))

    def _take(self, content: memoryview) -> None:
        """Hand what has come to TLS, and find out how much is missing of the last record."""
        self._arrived.write(content)
        at, header = self._missing, self._header
        while (stop := at + _HEADER - len(header)) <= len(content):
            header += content[at:stop]
            at, header = stop + int.from_bytes(header[-2:]), b""
        if at < len(content):
            at, header = len(content), header + content[at:]
        self._missing, self._header = at - len(content), header

    def _await_record(self) -> None:
        """Let the kernel wake this process when a record is whole: TLS can do nothing with a part of it.

        A slow link brings a record packet by packet, and waking for each of them would cost more than decrypting it.
        """
        least = self._missing or (_HEADER - len(self._header) if self._header else 1)
        if least != self._least:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least

    async def _flush(self) -> None:
        """Send what TLS has to say. Raises OSError."""
        if self._leaving.pending:
            await asyncio.get_running_loop().sock_sendall(self.socket, self._leaving.read())


_MUCH = _CHUNK // 2  # bytes
_ROUNDS = 4  # of reading and writing before other connections have their turn
_LINGER_SECONDS = 3.0  # for the other direction, once one of them has ended

End = PlainEnd | SecureEnd


@dataclass
class _Way:
    """One of the two directions."""

    source: End
    sink: End
    left: memoryview = field(default_factory=lambda: memoryview(b""))  # read, and not written yet
    ended: bool = False  # no more is to be read
    done: bool = False  # and everything is written
    carried: int = 0
    watched: tuple[bool, bool] = False, False  # whether the loop waits for the source, and for the sink


class Pipe:
    """Connects a rank's own socket with the one to another machine."""

    def __init__(self, near: PlainEnd, far: SecureEnd, closed: Callable[[Pipe], None]) -> None:
        """Carry from `begin` on, and call `closed` at the end."""
        self._loop = asyncio.get_running_loop()
        self._near, self._far, self._closed = near, far, closed
        self._out, self._in = _Way(near, far), _Way(far, near)
        self._open, self._hurried = True, False
        for end in (near, far):
            end.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                far.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def begin(self) -> None:
        """Carry what has come with the handshake, and all that follows."""
        self._work(self._out, self._in)

    @property
    def sent(self) -> int:
        """Return the bytes that went to the other machine, before they were encrypted."""
        return self._out.carried

    @property
    def received(self) -> int:
        """Return the bytes that came from the other machine, decrypted."""
        return self._in.carried

    def _work(self, *ways: _Way) -> None:
        """Go on in the directions in which something can be read or written."""
        for way in ways:
            if self._open and not way.done:
                try:
                    self._carry(way)
                except OSError:
                    self.close()
        if not self._open:
            return
        if self._out.done and (self._in.done or self._hurried):
            self.close()
            return
        for way in (self._out, self._in):
            self._watch(way, not way.ended and not way.left, bool(way.left))

    def _watch(self, way: _Way, reads: bool, writes: bool) -> None:
        """Go on whenever the source has something to read, or the sink takes something, as wanted."""
        before, way.watched = way.watched, (reads, writes)
        if reads and not before[0]:
            self._loop.add_reader(way.source.socket, self._work, way)
        elif before[0] and not reads:
            self._loop.remove_reader(way.source.socket)
        if writes and not before[1]:
            self._loop.add_writer(way.sink.socket, self._work, way)
        elif before[1] and not writes:
            self._loop.remove_writer(way.sink.socket)

    def _carry(self, way: _Way) -> None:
        """Carry in one direction until one end is not ready. Raises OSError if the far end has failed."""
        for _ in range(_ROUNDS):
            if way.left and not self._write(way, way.left):
                return
            if way.ended:
                self._finish(way)
                return
            try:
                content = way.source.read()
            except OSError:
                if way.source is self._far:
                    raise
                content = memoryview(b"")  # the rank is gone
            if content is None:
                return
            if not content:
                way.ended = True
                self._loop.call_later(_LINGER_SECONDS, self.close)
            way.carried += len(content)
            if not self._write(way, way.sink.seal(content) if content else way.sink.farewell()):
                return
            if len(content) < _MUCH and not way.ended:
                return  # to look for more would be in vain, mostly

    def _write(self, way: _Way, content: memoryview) -> bool:
        """Write what the sink takes, keep the rest, and return whether nothing is left."""
        try:
            while content:
                content = content[way.sink.socket.send(content) :]
        except BlockingIOError:
            # Buffers that all connections share are about to hold something else.
            way.left = memoryview(bytes(content)) if isinstance(content.obj, bytearray) else content
            return False
        except OSError:
            if way.sink is self._far:
                raise
            way.ended = True  # nobody is left to read it; what the rank has written still goes out
        way.left = memoryview(b"")
        return True

    def _finish(self, way: _Way) -> None:
        way.done = True
        with suppress(OSError):  # which says that the connection is gone already
            way.sink.socket.shutdown(socket.SHUT_WR)

    def hurry(self) -> None:
        """Close as soon as all that the rank has written has gone out: nobody is left to read what comes back."""
        self._hurried = True
        if self._out.done:
            self.close()

    def close(self) -> None:
        """Close both ends."""
        if self._open:
            self._open = False
            for way in (self._out, self._in):
                self._watch(way, False, False)
            for end in (self._near, self._far):
                end.socket.close()
            self._closed(self)
