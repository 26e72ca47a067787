"""Answers requests of many clients in one thread, so that none of them can hold up the others, or take much memory.

What a stranger can take is bounded: `_MOST_STRANGERS` connections that have not said hello, each with
`_HELLO_SECONDS` for its handshake and its hello. One more drops the oldest of the address that has most of them. With
TLS nobody without the token gets further than the handshake. What clients with the token can take is bounded, too: the
requests and answers that are under way together have at most `_MOST_PENDING` bytes.
"""

from __future__ import annotations

import errno
import logging
import resource
import selectors
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from horizonml import __version__
from horizonml.rendezvous.wire import (
    MOST_REQUEST,
    PROTOCOL,
    TLS_ALERT,
    TLS_RECORDS,
    Fields,
    check_hello,
    encode,
    explain_tls,
    is_plain,
    parse,
)
from horizonml.security.devices import REVOKED
from horizonml.text import printable

_log = logging.getLogger(__name__)
_HELLO_SECONDS = 5.0
_REQUEST_SECONDS = 10.0  # from a request's first byte to its last, and from an answer's first byte to its last
_IDLE_SECONDS = 120.0  # after which a client is dropped that has joined nothing
_KEEP_ALIVE = ((socket.SO_KEEPALIVE, 1), ("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))
_MOST_STRANGERS = 128
_MOST_CLIENTS = 8192
_SPARE_FILES = 64  # descriptors that are not for clients
_MOST_HELLO = 4096  # bytes
_TELL_SECONDS = 60.0  # between two words on clients of one address that were turned away
_MOST_TOLD = 64  # addresses of which something is said within that time
_MOST_PENDING = 64 << 20  # bytes of all clients' unfinished requests and answers
_SMALL = 1 << 16  # bytes of a request or an answer that always have room
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(eq=False)
class Peer:
    """The service's side of one connection."""

    address: str  # for people
    host: str = ""  # without the port
    state: dict[str, object] = field(default_factory=dict)  # of those who answer its requests
    stays: bool = False  # whether it may be silent for long, as a rank that trains
    proven: bool = True  # whether it has shown the token, where there is one
    serial: int = 0  # of the certificate that it has shown


Answer = Callable[[], Fields | None]  # None as long as there is none. Raises ValueError to refuse in words
Handler = Callable[[Peer, Fields], Answer]  # raises ValueError to refuse in words


class Strangers(Protocol):
    """What is done with clients that show no token."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """Return what accepts them, or None as long as nobody is accepted without a token."""

    def handle(self, peer: Peer, fields: Fields) -> Answer:
        """Answer a request. Raises ValueError to refuse in words."""


@dataclass(eq=False)
class _Client:
    """A connection, and how far its request or its answer has come."""

    socket: socket.socket
    peer: Peer
    deadline: float
    known: bool = False  # whether it has said hello
    shaking: bool = False  # whether its handshake goes on
    request: bytearray = field(default_factory=bytearray)
    waiting: Answer | None = None  # to a request that could not be answered yet
    answer: memoryview = field(default_factory=lambda: memoryview(b""))
    size: int = 0  # bytes of the whole answer
    last: bool = False  # whether the connection ends with the answer
    events: int = selectors.EVENT_READ

    @property
    def pending(self) -> int:
        """Return the bytes of its request and its answer, which stays whole until all of it is sent."""
        return len(self.request) + self.size


class Server:
    """Serves clients on a listening socket, with TLS or without."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        handler: Handler,
        greeting: Callable[[], Fields] = dict,
        strangers: Strangers | None = None,
    ) -> None:
        """Let `handler` answer requests: it returns what is called until it has an answer.

        Clients are told what the `greeting` says, such as `elsewhere`: where they find what they look for. Those who
        show no token are turned away, unless `strangers` answers them.
        """
        self._listener, self._tls, self._handler, self._greeting = listener, tls, handler, greeting
        self._strangers = strangers
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._clients: dict[_Client, None] = {}  # the oldest first
        self._most = min(_MOST_CLIENTS, _raise_limit() - _SPARE_FILES)
        self._told: dict[str, float] = {}

    @property
    def idle(self) -> bool:
        """Return whether there is no client."""
        return not self._clients

    def turn(self, seconds: float) -> None:
        """Serve whoever sends something within so many seconds."""
        REVOKED.refresh()
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            elif key.data in self._clients:  # it may just have been dropped
                self._go_on(key.data)
        for client in list(self._clients):
            if client.waiting is not None:
                self._ask(client, client.waiting)
        now = time.monotonic()
        for client in [one for one in self._clients if one.peer.serial in REVOKED]:
            self._drop(client, "the token of this device was revoked")
        for client in [one for one in self._clients if one.deadline < now]:
            self._drop(client, "" if client.known else "it said nothing in time")

    def close(self) -> None:
        """Drop all clients, and listen no more."""
        for client in list(self._clients):
            self._drop(client)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:  # it went away, or no descriptor is left
            _log.debug("a client could not be accepted: %s", error)
            if error.errno in _FULL:
                self._make_room()
            return
        peer = Peer(f"{address[0]}:{address[1]}", str(address[0]))
        strangers = [one for one in self._clients if not (one.known and one.peer.proven)]
        if len(strangers) >= _MOST_STRANGERS:  # whoever has most of them loses the oldest, and so no rank elsewhere
            greedy = Counter(one.peer.host for one in strangers).most_common(1)[0][0]
            self._drop(next(one for one in strangers if one.peer.host == greedy))
        if len(self._clients) >= self._most and not self._make_room():
            connection.close()
            self._tell(peer, f"there are {self._most} clients already")
            return
        try:
            _prepare(connection)
            if self._tls is not None:
                tls = (self._strangers.tls if self._strangers is not None else None) or self._tls
                connection = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        except OSError as error:  # it has gone already
            _log.debug("%s went away: %s", peer.address, error)
            connection.close()
            return
        client = _Client(connection, peer, time.monotonic() + _HELLO_SECONDS, shaking=self._tls is not None)
        self._clients[client] = None
        self._selector.register(connection, client.events, client)

    def _make_room(self) -> bool:
        """Drop the oldest stranger, or else the oldest client that has joined nothing; return whether there was one."""
        client = min((one for one in self._clients if not one.peer.stays), key=lambda one: one.known, default=None)
        if client is not None:
            self._drop(client, "others need its place")
        return client is not None

    def _go_on(self, client: _Client) -> None:
        try:
            if client.shaking:
                assert isinstance(client.socket, ssl.SSLSocket)
                client.socket.do_handshake()
                client.shaking = False
                shown = client.socket.getpeercert()  # None where no certificate was asked for
                client.peer.proven = bool(shown)
                client.peer.serial = int(str(shown["serialNumber"]), 16) if shown else 0
            if client.answer:
                self._write(client)
            while not client.answer and client in self._clients:
                received = client.socket.recv(1 << 16)
                if not received:
                    self._drop(client)
                    break
                self._take(client, received)
        except ssl.SSLWantReadError:
            self._want(client, selectors.EVENT_READ)
        except (BlockingIOError, ssl.SSLWantWriteError):
            self._want(client, selectors.EVENT_WRITE if client.answer else selectors.EVENT_READ)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # as a check whether the port is open does
            self._drop(client)
        except ssl.SSLError as error:
            if client.shaking and is_plain(error):
                _say_encrypted(client.socket)
            self._drop(client, explain_tls(error) if client.shaking and error.reason else "")
        except OSError as error:
            _log.debug("%s went away: %s", client.peer.address, error)
            self._drop(client)

    def _take(self, client: _Client, received: bytes) -> None:
        if not client.request:
            client.deadline = min(client.deadline, time.monotonic() + _REQUEST_SECONDS)
        client.request += received
        if not client.known and client.request[0] in TLS_RECORDS:
            self._refuse(client, "it encrypts, and this service runs without a token")
            return
        line, found, rest = client.request.partition(b"\n")
        if not found:
            if len(client.request) > (MOST_REQUEST if client.known and client.peer.proven else _MOST_HELLO):
                self._refuse(client, "the request is too long")
            elif len(client.request) > _SMALL and self._is_full():
                self._refuse(client, "other requests take all the room")
            return
        if client.waiting is not None or rest:
            self._refuse(client, "a client waits for the answer before it asks again")
            return
        client.request.clear()
        try:
            fields = parse(bytes(line), MOST_REQUEST)
            if not client.known:
                check_hello(fields)
        except ValueError as error:
            self._refuse(client, str(error))
            return
        if not client.known:
            client.known = True
            greeting = {"protocol": PROTOCOL, "version": __version__, "time": time.time()}
            more = {**self._greeting(), "revoked": REVOKED.text()} if client.peer.proven else {}
            self._answer(client, greeting | more)
            return
        self._ask(client, lambda: self._begin(client, fields))

    def _begin(self, client: _Client, fields: Fields) -> Fields | None:
        handler = self._handler if client.peer.proven or self._strangers is None else self._strangers.handle
        client.waiting = handler(client.peer, fields)
        return client.waiting()

    def _ask(self, client: _Client, give: Answer) -> None:
        try:
            answer = give()
        except ValueError as error:
            answer = {"error": printable(str(error), 2000)}
        except Exception:  # noqa: BLE001  (a bug in one answer does not end the service for all)
            _log.exception("a request of %s could not be answered", client.peer.address)
            answer = {"error": "the service could not answer; its log says why"}
        if answer is None:
            client.deadline = float("inf")
            return
        client.waiting = None
        self._answer(client, answer)

    def _refuse(self, client: _Client, reason: str) -> None:
        self._tell(client.peer, reason)
        client.last = True
        self._answer(client, {"error": printable(reason, 2000)})

    def _answer(self, client: _Client, fields: Fields) -> None:
        answer = encode(fields)
        if len(answer) > _SMALL and self._is_full():
            self._drop(client, "other answers take all the room")
            return
        client.answer, client.size = memoryview(answer), len(answer)
        client.deadline = time.monotonic() + _REQUEST_SECONDS
        try:
            self._write(client)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            self._want(client, selectors.EVENT_WRITE)
        except OSError as error:
            _log.debug("%s went away: %s", client.peer.address, error)
            self._drop(client)

    def _write(self, client: _Client) -> None:
        while client.answer:
            client.answer = client.answer[client.socket.send(client.answer) :]
        client.answer, client.size = memoryview(b""), 0  # lets go of it
        if client.last:
            self._drop(client)
            return
        patience = _IDLE_SECONDS if client.peer.proven else _HELLO_SECONDS
        client.deadline = float("inf") if client.peer.stays else time.monotonic() + patience
        self._want(client, selectors.EVENT_READ)

    def _is_full(self) -> bool:
        """Return whether the requests and answers that are under way take all the memory that they may."""
        return sum(one.pending for one in self._clients) > _MOST_PENDING

    def _want(self, client: _Client, events: int) -> None:
        if client in self._clients and client.events != events:
            client.events = events
            self._selector.modify(client.socket, events, client)

    def _drop(self, client: _Client, reason: str = "") -> None:
        if client in self._clients:
            del self._clients[client]
            self._selector.unregister(client.socket)
            if client.last:  # so that an unread request does not take the answer back
                with suppress(OSError):
                    client.socket.shutdown(socket.SHUT_WR)
            client.socket.close()
            if reason:
                self._tell(client.peer, reason)

    def _tell(self, peer: Peer, reason: str) -> None:
        """Log that a client was turned away; not again for the same address within a minute."""
        now = time.monotonic()
        self._told = {host: at for host, at in self._told.items() if now - at < _TELL_SECONDS}
        if peer.host in self._told or len(self._told) >= _MOST_TOLD:
            return
        self._told[peer.host] = now
        _log.warning("turned away a client at %s: %s", peer.address, printable(reason))


def _prepare(connection: socket.socket) -> None:
    """Set what a client's socket needs. Raises OSError if the client has gone already."""
    connection.setblocking(False)
    for name, value in _KEEP_ALIVE:
        option, level = (name, socket.SOL_SOCKET) if isinstance(name, int) else (None, socket.IPPROTO_TCP)
        option = getattr(socket, str(name), None) if option is None else option
        if option is not None:
            connection.setsockopt(level, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _say_encrypted(connection: socket.socket) -> None:
    """Answer a client that does not encrypt by an alert of TLS, which tells it that the service does."""
    with suppress(OSError):
        socket.socket.send(connection, TLS_ALERT)
        socket.socket.recv(connection, 1 << 16)  # what is left unread would take the alert back


def _raise_limit() -> int:
    """Let this process have as many files as it may, and return how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_CLIENTS + _SPARE_FILES
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return wanted if soft == resource.RLIM_INFINITY else min(soft, wanted)
