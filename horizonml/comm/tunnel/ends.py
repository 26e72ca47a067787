"""The two ends of what a tunnel carries: a rank's own socket, and the encrypted one to another machine.

Runs many connections in one thread: callbacks for sockets that are ready, and tasks that wait for them.

Carries bytes between a rank's socket and another machine, both ways, until both are done.
"""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

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


READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_TICK = 0.25  # seconds between two looks at deadlines
_log = logging.getLogger(__name__)

Wait = tuple[socket.socket, int] | float  # for a socket to be ready, or for some seconds
Task = Generator[Wait, None, Any]


@dataclass(eq=False)
class Running:
    """A task that has begun, and what it waits for."""

    task: Task
    deadline: float
    socket: socket.socket | None = None
    until: float = 0.0


class Loop:
    """Waits for sockets, and goes on with whatever waits for them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._watched: dict[socket.socket, tuple[int, Callable[[int], None]]] = {}
        self._running: dict[Running, None] = {}
        self._looked = 0.0

    def watch(self, watched: socket.socket, mask: int, callback: Callable[[int], None]) -> None:
        """Call `callback` whenever a socket can be read or written, as the mask says; 0 forgets the socket."""
        before = self._watched.get(watched)
        if mask and before is None:
            self._selector.register(watched, mask)
        elif mask and before is not None and before[0] != mask:
            self._selector.modify(watched, mask)
        elif not mask and before is not None:
            self._selector.unregister(watched)
        if mask:
            self._watched[watched] = mask, callback
        else:
            self._watched.pop(watched, None)

    def close(self, watched: socket.socket) -> None:
        """Forget and close a socket."""
        if watched in self._watched:
            self.watch(watched, 0, lambda _: None)
        watched.close()

    def start(self, task: Task, seconds: float = float("inf")) -> Running:
        """Begin a task, into which TimeoutError is thrown if it takes longer than `seconds`."""
        running = Running(task, time.monotonic() + seconds)
        self._running[running] = None
        self._resume(running)
        return running

    def end(self, running: Running) -> None:
        """Throw a task out that is not done yet."""
        self._resume(running, TimeoutError("given up"))

    def turn(self) -> None:
        """Wait for something to do, no longer than until the next look at deadlines, and do it."""
        for key, mask in self._selector.select(_TICK):
            entry = self._watched.get(cast(socket.socket, key.fileobj))
            if entry is not None:  # which another callback may have closed
                entry[1](mask)
        now = time.monotonic()
        if now - self._looked < _TICK:
            return
        self._looked = now
        for running in list(self._running):
            if now > running.deadline:
                self._resume(running, TimeoutError("no answer in time"))
            elif running.socket is None and now >= running.until:
                self._resume(running)

    def _resume(self, running: Running, error: Exception | None = None) -> None:
        """Let a task go on to its next wait, or to its end."""
        if running not in self._running:
            return
        if running.socket is not None:
            self.watch(running.socket, 0, lambda _: None)
            running.socket = None
        try:
            wait = running.task.throw(error) if error is not None else next(running.task)
        except StopIteration:
            del self._running[running]
        except Exception as problem:  # noqa: BLE001  (one connection's trouble is not the others')
            del self._running[running]
            if not isinstance(problem, OSError):
                _log.exception("a connection of the tunnel failed")
        else:
            if isinstance(wait, float):
                running.until = time.monotonic() + wait
            else:
                running.socket = wait[0]
                self.watch(wait[0], wait[1], lambda _: self._resume(running))


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
