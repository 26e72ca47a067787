"""Accepts other machines' connections to this one's ranks, and makes its ranks' connections to them."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass

from horizonml.comm.tunnel.addresses import (
    HEADER_BYTES,
    NETWORK,
    Answer,
    Target,
    connected_from,
    is_vouched_for,
    kernel_table,
    listener_of,
    vouch,
)
from horizonml.comm.tunnel.ends import READ, WRITE, Loop, Pipe, PlainEnd, Running, SecureEnd, Task, Wait
from horizonml.security.tls import client_context, server_context
from horizonml.security.token import Token

MOST_CONNECTIONS = 2048  # each keeps up to 256 KiB, if its receiver is slow
MOST_HANDSHAKES = 64  # at a time
HANDSHAKE_SECONDS = 5.0
_REACH_SECONDS = 30.0  # in which another machine's tunnel must answer
_AGAIN_SECONDS = 0.25  # between two attempts to reach it, or to take over the machine's port
_MOST_WAITING = 16  # connections to a stand-in; the kernel keeps less
_PROBE = str(NETWORK[-2])  # no rank's address


@dataclass
class Opening:
    """A socket that stands for a rank on another machine, until this machine's rank has connected to it."""

    listener: socket.socket
    at: tuple[str, int]
    target: Target
    where: tuple[str, int]  # the other machine's tunnel
    state: str = "waiting"  # then "connecting", and "connected" or "failed"
    reason: str = ""


@dataclass(eq=False)
class _Arrival:
    """A connection of another machine that has not shown the token yet."""

    source: str
    running: Running | None = None


class Carrier:
    """Holds the connections of one rank's tunnel."""

    def __init__(self, loop: Loop, token: Token, encrypt: bool) -> None:
        """Prepare to carry, in `loop`, between processes that have this token."""
        self._loop, self._token, self._encrypt = loop, token, encrypt
        self._server, self._client = server_context(token), client_context(token)
        self._listener: socket.socket | None = None
        self._serving: Running | None = None
        self.serving, self.reason = "no", ""  # then "standby", "yes" or "failed"
        self._arriving: dict[_Arrival, None] = {}  # the oldest first
        self._pipes: set[Pipe] = set()
        self._openings: dict[int, Opening] = {}
        self._opened = 0
        self._ended = False
        self._sent = self._received = self.refused = 0
        self.cipher = ""

    @property
    def pipes(self) -> int:
        """Return how many connections are carried now."""
        return len(self._pipes)

    @property
    def sent(self) -> int:
        """Return the bytes sent to other machines so far."""
        return self._sent + sum(pipe.sent for pipe in self._pipes)

    @property
    def received(self) -> int:
        """Return the bytes received from other machines so far."""
        return self._received + sum(pipe.received for pipe in self._pipes)

    def serve(self, address: str, port: int) -> None:
        """Accept connections for this machine's ranks at an address, as soon as no other rank's tunnel does."""
        self.stop_serving()
        self.serving, self.reason = "no", ""
        self._serving = self._loop.start(self._take_port(address, port))

    def stop_serving(self) -> None:
        """Accept no more connections, so that another rank's tunnel may."""
        if self._serving is not None:
            self._loop.end(self._serving)
        if self._listener is not None:
            self._loop.close(self._listener)
            self._listener = None

    @property
    def busy(self) -> bool:
        """Return whether connections are carried, or a rank's own is about to be."""
        return bool(self._pipes) or any(opening.state == "connecting" for opening in self._openings.values())

    def end(self) -> None:
        """Accept no more, because the rank has ended; what belongs to other ranks of this machine goes on."""
        self._ended = True
        self.stop_serving()
        for opening in self._openings.values():
            if opening.state == "waiting":
                self._depart(opening)  # if its rank has connected at the last moment
        for pipe in list(self._pipes):
            pipe.hurry()

    def _take_port(self, address: str, port: int) -> Task:
        """Listen at the machine's port, or stand by until whoever does so now is gone."""
        try:
            where = _resolve(address, port)
        except OSError as error:
            self.serving, self.reason = "failed", error.strerror or str(error)
            return
        while True:
            try:
                listener = _listen(where)
            except OSError as error:
                # Whoever stands by goes on trying: the machine's address may be gone for a moment.
                if error.errno != errno.EADDRINUSE and self.serving != "standby":
                    self.serving, self.reason = "failed", error.strerror or str(error)
                    return
            else:
                self._listener, self.serving = listener, "yes"
                self._loop.watch(listener, READ, self._accept)
                return
            if self.serving == "no":
                try:
                    found = yield from self._carried_by_another(where)
                except (ConnectionRefusedError, ConnectionResetError):
                    continue  # it has just ended
                except OSError as error:
                    self.serving, self.reason = "failed", f"the port belongs to no tunnel with this token ({error})"
                    return
                if not found:
                    self.serving, self.reason = "failed", "another user's tunnel listens there"
                    return
                self.serving = "standby"
            yield _AGAIN_SECONDS

    def _carried_by_another(self, where: tuple[int, tuple[str, int]]) -> Generator[Wait, None, bool]:
        """Return whether the tunnel that has the port would carry to this one's user. Raises OSError."""
        with (
            socket.create_server((_PROBE, 0)) as probe,
            vouch(self._token, _PROBE, probe.getsockname()[1]),
            socket.socket(where[0], socket.SOCK_STREAM) as connection,
        ):
            connection.settimeout(0)
            yield from _connect(connection, where[1])
            far = SecureEnd(connection, self._client, False)
            yield from far.handshake()
            yield from far.send(Target(_PROBE, probe.getsockname()[1], False).to_bytes())
            return (yield from far.receive(1)) == bytes([Answer.CONNECTED])

    def _accept(self, _: int) -> None:
        assert self._listener is not None
        for _ in range(16):
            try:
                connection, source = self._listener.accept()
            except OSError:  # nobody is left, or who was there has gone, or there are no descriptors for a moment
                return
            connection.setblocking(False)
            while len(self._arriving) >= MOST_HANDSHAKES:
                # Whoever has most unfinished ones loses the oldest: a stranger, not a rank, whose handshake is short.
                greedy = Counter(one.source for one in self._arriving).most_common(1)[0][0]
                self._loop.end(next(one.running for one in self._arriving if one.source == greedy and one.running))
            arrival = _Arrival(str(source[0]))
            self._arriving[arrival] = None
            arrival.running = self._loop.start(self._arrive(connection, arrival), HANDSHAKE_SECONDS)

    def _arrive(self, accepted: socket.socket, arrival: _Arrival) -> Task:
        """Shake hands with another machine, and connect it with the rank that it asks for."""
        connection: socket.socket | None = accepted
        near: socket.socket | None = None
        try:
            far = SecureEnd(accepted, self._server, True)
            yield from far.handshake()
            target = Target.from_bytes((yield from far.receive(HEADER_BYTES)))
            answer, near = yield from self._reach(target)
            yield from far.send(bytes([answer]))
            if near is not None:
                if target.plain:
                    yield from far.leave_tls()
                self._carry(near, far)
                connection = near = None
        except (OSError, ValueError) as error:
            # A rank that only looks whether it reaches this machine says nothing, and is no stranger.
            self.refused += not isinstance(error, ConnectionResetError)
        finally:
            del self._arriving[arrival]
            for left in (connection, near):
                if left is not None:
                    self._loop.close(left)

    def _reach(self, target: Target) -> Generator[Wait, None, tuple[Answer, socket.socket | None]]:
        """Connect to one of this user's ranks on this machine that has this token, and to nothing else."""
        if len(self._pipes) >= MOST_CONNECTIONS:
            return Answer.FULL, None
        is_own = listener_of(kernel_table(), target.address, target.port) == os.geteuid()
        if not is_own or not is_vouched_for(self._token, target.address, target.port):
            return Answer.NOBODY, None
        near = socket.socket()
        near.setblocking(False)
        try:
            yield from _connect(near, (target.address, target.port))
        except OSError:
            near.close()
            return Answer.NOBODY, None
        return Answer.CONNECTED, near

    def _carry(self, near: socket.socket, far: SecureEnd) -> None:
        self.cipher = far.cipher
        pipe = Pipe(self._loop, PlainEnd(near), far, self._forget)
        self._pipes.add(pipe)
        pipe.begin()
        if self._ended:
            pipe.hurry()

    def _forget(self, pipe: Pipe) -> None:
        self._pipes.discard(pipe)
        self._sent += pipe.sent
        self._received += pipe.received

    def open(self, host: str, port: int, stand_in: str, target: Target) -> tuple[int, tuple[str, int]]:
        """Listen in another machine's stead for one connection of this user's; return its number and address.

        Raises OSError.
        """
        listener = socket.create_server((stand_in, 0), backlog=4)
        listener.setblocking(False)
        at = listener.getsockname()
        opening = Opening(listener, (at[0], at[1]), target, (host, port))
        self._opened += 1
        self._openings[self._opened] = opening
        self._loop.watch(listener, READ, lambda _: self._depart(opening))
        return self._opened, opening.at

    def state_of(self, number: int) -> tuple[str, str]:
        """Return how far an opening has come, and why it has failed."""
        opening = self._openings.get(number)
        return (opening.state, opening.reason) if opening is not None else ("failed", "it was closed")

    def close(self, number: int) -> None:
        """Wait no longer for a rank to connect; what is connected stays."""
        opening = self._openings.pop(number, None)
        if opening is not None:
            self._loop.close(opening.listener)

    def _depart(self, opening: Opening) -> None:
        """Take the connection of this machine's rank, if it is its, and begin to connect it with the other machine."""
        for _ in range(_MOST_WAITING):
            try:
                near, source = opening.listener.accept()
            except OSError:  # nobody is left, or who was there has gone
                return
            near.setblocking(False)
            try:
                own = connected_from(kernel_table(), (source[0], source[1]), opening.at) == os.geteuid()
            except OSError as error:  # nobody can say who it is
                near.close()
                self._loop.close(opening.listener)
                opening.state, opening.reason = "failed", f"the kernel does not say who connects ({_words(error)})"
                return
            if own:
                self._loop.close(opening.listener)
                opening.state = "connecting"
                self._loop.start(self._go_out(opening, near), _REACH_SECONDS)
                return
            near.close()  # another user of this machine

    def _go_out(self, opening: Opening, near: socket.socket) -> Task:
        """Connect a rank with the other machine, whose tunnel may be about to be taken over by another rank's."""
        connected = False
        try:
            where = _resolve(*opening.where)
            while not connected:
                try:
                    connected = yield from self._attempt(opening, near, where)
                except ConnectionError as error:
                    opening.reason = _words(error)
                    yield _AGAIN_SECONDS
        except (OSError, ValueError) as error:
            if not (isinstance(error, TimeoutError) and opening.reason):
                opening.reason = _words(error)
        finally:
            if connected:
                opening.state, opening.reason = "connected", ""
            else:
                opening.state = "failed"
                near.close()

    def _attempt(
        self, opening: Opening, near: socket.socket, where: tuple[int, tuple[str, int]]
    ) -> Generator[Wait, None, bool]:
        """Return True once a rank's connection is carried. Raises OSError, ValueError if the other side refuses."""
        connection: socket.socket | None = socket.socket(where[0], socket.SOCK_STREAM)
        assert connection is not None
        try:
            connection.setblocking(False)
            yield from _connect(connection, where[1])
            far = SecureEnd(connection, self._client, False)
            yield from far.handshake()
            yield from far.send(opening.target.to_bytes())
            (answer,) = yield from far.receive(1)
            if answer != Answer.CONNECTED:
                raise ValueError(Answer(answer).words)
            if opening.target.plain:
                yield from far.leave_tls()
            self._carry(near, far)
            connection = None
            return True
        finally:
            if connection is not None:
                self._loop.close(connection)


def _resolve(host: str, port: int) -> tuple[int, tuple[str, int]]:
    """Return the family and the target of a numeric address. Raises OSError."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    return int(family), target  # type: ignore[return-value]


def _listen(where: tuple[int, tuple[str, int]]) -> socket.socket:
    """Return a socket that listens for other machines. Raises OSError."""
    listener = socket.socket(where[0], socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(where[1])
        listener.listen(512)
    except OSError:
        listener.close()
        raise
    return listener


def _connect(connection: socket.socket, target: tuple[str, int]) -> Generator[Wait, None, None]:
    """Connect a socket that does not block. Raises OSError."""
    try:
        connection.connect(target)
    except BlockingIOError:
        yield connection, WRITE
        problem = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise OSError(problem, os.strerror(problem)) from None


def _words(error: Exception) -> str:
    """Return why another machine was not reached, for people."""
    if isinstance(error, ssl.SSLError):
        return f"it does not have this job's token, or is not a tunnel ({error.reason or error})"
    return (getattr(error, "strerror", None) or str(error)).lower()
