"""Serves web pages beside other work, and never disturbs it.

One thread serves all clients, at most `Limits.clients` at a time. Each connection serves one request, within
`Limits.seconds` from the request's first byte to the answer's last. When one more client connects, the oldest
connection is dropped, so that clients that are slow on purpose exhaust neither threads nor descriptors, and keep nobody
out. An answer that takes long is made by a second thread, one after the other, while the first one goes on serving.

Reads what a web client asks for, and writes what it is answered.
"""

from __future__ import annotations

import logging
import math
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qsl, unquote

TEXT = "text/plain; charset=utf-8"
_MOST_FIELDS = 64  # of a query


@dataclass(frozen=True)
class Request:
    """Holds what a client asks for. A header's name is in lower case; of several with the same name the last counts."""

    method: str
    path: str  # without the query, and with escapes undone
    query: Mapping[str, str]
    headers: Mapping[str, str]
    peer: str  # the client's address
    time: float  # when it was complete, of `time.monotonic`


@dataclass(frozen=True)
class Reply:
    """Holds an answer, after which the connection is closed."""

    status: int
    body: bytes
    kind: str = TEXT
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def text(cls, status: int, words: str, headers: Mapping[str, str] | None = None) -> Reply:
        """Return an answer in words."""
        return cls(status, words.encode(), TEXT, headers or {})

    def encode(self) -> bytes:
        """Return the bytes that are sent."""
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            "Server: horizonml",
            f"Content-Type: {self.kind}",
            f"Content-Length: {len(self.body)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
            "Connection: close",
        ]
        assert not any("\r" in line or "\n" in line for line in lines), "a header must not begin another one"
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + self.body


@dataclass(frozen=True)
class Later:
    """Is returned by a handler whose answer takes long: the server has a thread make it, and serves others meanwhile.

    `make` must come to an end by itself, within `seconds`; the client waits no longer.
    """

    make: Callable[[], Reply]
    seconds: float


def parse(received: bytes, peer: str) -> Request | Reply:
    """Return the request that begins with these bytes, up to its empty line, or the answer that refuses it."""
    first, *lines = received.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
        return Reply.text(400, "not a request\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        return Reply.text(413, "a request must have no body\n")
    path, _, query = words[1].partition("?")
    try:
        fields = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError:
        return Reply.text(400, "the query has too many fields\n")
    return Request(words[0], unquote(path), fields, headers, peer, time.monotonic())


_log = logging.getLogger(__name__)
_MOST_WAITING = 256  # connections that the system queues until they are accepted
_LOOK_SECONDS = 0.5  # the interval between checks for connections that last too long
_CHUNK = 1 << 16  # bytes that are sent at once


@dataclass(frozen=True)
class Limits:
    """Bounds what clients can take of a server."""

    seconds: float = 5.0  # a connection that lasts longer is dropped
    clients: int = 32  # at a time
    request: int = 8192  # bytes
    later: int = 4  # answers that take long and are waited for


DEFAULT = Limits()
Handler = Callable[[Request], Reply | Later]


@dataclass(eq=False)
class _Client:
    """Holds a connection, and how far its request or its answer has come."""

    socket: socket.socket
    peer: str
    deadline: float
    received: bytes = b""
    request: Request | None = None
    answer: memoryview = field(default_factory=lambda: memoryview(b""))
    waits: bool = False  # for an answer that takes long


@dataclass(frozen=True)
class _Work:
    """Holds an answer that is to be made, or has been made."""

    client: _Client
    later: Later
    reply: Reply | None = None


class WebServer:
    """Runs a small web server in a thread of its own."""

    def __init__(
        self,
        name: str,
        address: tuple[str, int],
        handler: Handler,
        limits: Limits = DEFAULT,
        sent: Callable[[Request], None] = lambda request: None,
    ) -> None:
        """Start the server, which is called `name` in messages. Raises OSError if it cannot listen at `address`.

        `handler` answers requests, and must do so at once: what takes long is returned as `Later`. `sent` is told of
        each request whose answer has been sent in full.
        """
        self._name, self._handler, self._limits, self._sent = name, handler, limits, sent
        self._clients: list[_Client] = []  # those whose request or answer is under way, the oldest first
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=_MOST_WAITING)
        self.port = int(self._listener.getsockname()[1])
        self._listener.setblocking(False)
        self._closing = False
        self._waker, self._wakes = socket.socketpair()
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._to_do: queue.Queue[_Work | None] = queue.Queue()
        self._done: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None  # started with the first answer that takes long
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server. An answer that is being made is not waited for."""
        self._closing = True
        self._wake()
        self._thread.join()
        self._to_do.put(None)

    def _wake(self) -> None:
        with suppress(OSError):  # it is awake, because what it reads is full; or it has ended
            self._waker.send(b".")

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(_LOOK_SECONDS):
                if key.fileobj is self._wakes:
                    self._wakes.recv(1024)
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._clients:  # it may just have been dropped
                    self._go_on(key.data)
            self._hand_out()
            now = time.monotonic()
            for client in [one for one in self._clients if one.deadline < now]:
                self._drop(client)
        for client in list(self._clients):
            self._drop(client)
        for open_socket in (self._listener, self._wakes, self._waker):
            open_socket.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError as error:  # it went away, or no descriptor is left, and then one is freed
            _log.debug("a client of the %s could not be accepted: %s", self._name, error)
            if self._clients:
                self._drop(self._clients[0])
            else:
                time.sleep(0.05)
            return
        limits = self._limits
        if len(self._clients) >= limits.clients:
            self._drop(self._clients[0])
        connection.setblocking(False)
        client = _Client(connection, str(peer[0]), time.monotonic() + limits.seconds)
        self._clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _go_on(self, client: _Client) -> None:
        """Read what has arrived of a request, or write what fits of the answer."""
        try:
            if client.waits:  # nothing may come but the end
                if not client.socket.recv(_CHUNK):
                    self._drop(client)
                return
            if not client.answer:
                most = self._limits.request
                received = client.socket.recv(most)
                client.received += received
                complete = b"\r\n\r\n" in client.received
                if not complete and received and len(client.received) <= most:
                    return
                reply = self._answer(client) if complete else Reply.text(400, "not a request\n")
                if reply is None:
                    return
                self._begin(client, reply)
            client.answer = client.answer[client.socket.send(client.answer[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError as error:
            _log.debug("a client of the %s went away: %s", self._name, error)
            self._drop(client)
            return
        if not client.answer:
            if client.request is not None:
                self._sent(client.request)
            self._drop(client)

    def _begin(self, client: _Client, reply: Reply) -> None:
        """Begin to answer."""
        client.answer = memoryview(reply.encode())
        self._selector.modify(client.socket, selectors.EVENT_WRITE, client)

    def _drop(self, client: _Client) -> None:
        self._clients.remove(client)
        self._selector.unregister(client.socket)
        client.socket.close()

    def _answer(self, client: _Client) -> Reply | None:
        """Return the answer to a complete request, or None if it takes long."""
        request = parse(client.received, client.peer)
        if isinstance(request, Reply):
            return request
        client.request = request
        reply = self._made(lambda: self._handler(request), request.path)
        if isinstance(reply, Reply):
            return reply
        if sum(one.waits for one in self._clients) >= self._limits.later:
            return Reply.text(503, "too many requests are waiting; try again in a moment\n", {"Retry-After": "2"})
        if self._worker is None:
            worker = threading.Thread(target=self._work, name=f"{self._name}, slow", daemon=True)
            try:
                worker.start()
            except (RuntimeError, MemoryError):
                return Reply.text(503, "not enough memory is left; try again later\n", {"Retry-After": "10"})
            self._worker = worker
        client.waits = True
        client.deadline = max(client.deadline, time.monotonic() + reply.seconds)
        self._to_do.put(_Work(client, reply))
        return None

    def _made(self, make: Callable[[], Reply | Later], path: str) -> Reply | Later:
        try:
            return make()
        except Exception:  # noqa: BLE001  (a bug in a page ends neither the server nor what it runs beside)
            _log.exception("%s: %s could not be made", self._name, path)
            return Reply.text(500, f"{path} could not be made; see the log\n")

    def _work(self) -> None:
        """Make the answers that take long, until the server ends."""
        while (work := self._to_do.get()) is not None and not self._closing:
            if work.client not in self._clients:  # it has gone
                continue
            assert work.client.request is not None
            reply = self._made(work.later.make, work.client.request.path)
            assert isinstance(reply, Reply)
            self._done.put(_Work(work.client, work.later, reply))
            self._wake()

    def _hand_out(self) -> None:
        """Begin to send what has been made meanwhile."""
        while not self._done.empty():
            work = self._done.get()
            if work.client in self._clients and work.reply is not None:
                work.client.waits = False
                work.client.deadline = time.monotonic() + math.ceil(self._limits.seconds)
                self._begin(work.client, work.reply)
