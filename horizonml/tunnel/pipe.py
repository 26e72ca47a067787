"""Carries bytes between a rank's socket and another machine, both ways, until both are done."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from horizonml.tunnel.ends import PlainEnd, SecureEnd
from horizonml.tunnel.loop import READ, WRITE, Loop, Task

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


class Pipe:
    """Connects a rank's own socket with the one to another machine."""

    def __init__(self, loop: Loop, near: PlainEnd, far: SecureEnd, closed: Callable[[Pipe], None]) -> None:
        """Carry from now on, and call `closed` at the end."""
        self._loop, self._near, self._far, self._closed = loop, near, far, closed
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
        self._work(READ)

    @property
    def sent(self) -> int:
        """Return the bytes that went to the other machine, before they were encrypted."""
        return self._out.carried

    @property
    def received(self) -> int:
        """Return the bytes that came from the other machine, decrypted."""
        return self._in.carried

    def _work(self, _: int) -> None:
        for way in (self._out, self._in):
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
        for end, reads, writes in ((self._near, self._out, self._in), (self._far, self._in, self._out)):
            mask = READ * (not reads.ended and not reads.left) | WRITE * bool(writes.left)
            self._loop.watch(end.socket, mask, self._work)

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
                self._loop.start(self._linger())
            way.carried += len(content)
            if not self._write(way, way.sink.seal(content) if content else way.sink.farewell()):
                return

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

    def _linger(self) -> Task:
        """Close everything some time after one direction has ended."""
        until = time.monotonic() + _LINGER_SECONDS
        while self._open and time.monotonic() < until:
            yield 0.25
        self.close()

    def close(self) -> None:
        """Close both ends."""
        if self._open:
            self._open = False
            for end in (self._near, self._far):
                self._loop.close(end.socket)
            self._closed(self)
