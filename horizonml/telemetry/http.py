"""Serves web pages and a rank's metrics beside other work, and never disturbs it.

One thread serves all clients, at most `Limits.clients` at a time. Each connection serves one request, within
`Limits.seconds` from the request's first byte to the answer's last. When one more client connects, the oldest
connection is dropped, so that clients that are slow on purpose exhaust neither threads nor descriptors, and keep nobody
out. Answers that take long are made by other threads, one after the other, while the first one goes on serving.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from urllib.parse import parse_qsl, unquote

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, gzip_accepted

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
_CHUNK = 1 << 16  # bytes that are read at once where nothing should come


@dataclass(frozen=True)
class Limits:
    """Bounds what clients can take of a server."""

    seconds: float = 5.0  # a connection that lasts longer is dropped
    clients: int = 32  # at a time
    request: int = 8192  # bytes
    later: int = 4  # answers that take long and are waited for


DEFAULT = Limits()
Handler = Callable[[Request], Reply | Later]


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
        self._clients: dict[asyncio.Task[None], None] = {}  # those whose request or answer is under way, oldest first
        self._waiting = 0  # clients that wait for an answer that takes long
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=_MOST_WAITING)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._slow = asyncio.Lock()  # held while an answer that takes long is made
        self._accepting = self._loop.create_task(self._accept())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server. An answer that is being made is not waited for."""
        self._loop.call_soon_threadsafe(self._accepting.cancel)
        self._thread.join()

    def _run(self) -> None:
        with self._listener, suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._accepting)
        self._loop.close()

    async def _accept(self) -> None:
        try:
            await self._accept_all()
        finally:
            clients = list(self._clients)
            for client in clients:
                client.cancel()
            if clients:
                await asyncio.wait(clients)

    async def _accept_all(self) -> None:
        while True:
            try:
                connection, peer = await self._next()
            except OSError as error:  # it went away, or no descriptor is left, and then one is freed
                _log.debug("a client of the %s could not be accepted: %s", self._name, error)
                await self._drop_oldest(0)
                await asyncio.sleep(0.05)
                continue
            client = self._loop.create_task(self._serve(connection, str(peer[0])))
            self._clients[client] = None
            client.add_done_callback(partial(self._forget, connection))
            await self._drop_oldest(self._limits.clients)

    async def _next(self) -> tuple[socket.socket, tuple[object, ...]]:
        """Accept a connection. Raises OSError. Unlike `sock_accept`, this loses none when the server is closed."""
        ready = asyncio.Event()
        self._loop.add_reader(self._listener, ready.set)
        try:
            while True:
                with suppress(BlockingIOError):
                    return self._listener.accept()
                ready.clear()
                await ready.wait()
        finally:
            self._loop.remove_reader(self._listener)

    async def _drop_oldest(self, most: int) -> None:
        if len(self._clients) > most:
            oldest = next(iter(self._clients))
            oldest.cancel()
            await asyncio.wait((oldest,))  # until its descriptor is free

    def _forget(self, connection: socket.socket, client: asyncio.Task[None]) -> None:
        self._clients.pop(client, None)
        connection.close()  # here, since a task that is cancelled may never have begun

    async def _serve(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
        try:
            async with asyncio.timeout(self._limits.seconds) as patience:
                request = await self._read(connection, peer)
                reply = request if isinstance(request, Reply) else self._made(request.path, self._handler, request)
                if isinstance(reply, Later):
                    assert isinstance(request, Request)
                    reply = await self._wait_for(reply, request.path, connection, patience)
                await self._loop.sock_sendall(connection, reply.encode())
            if isinstance(request, Request):
                self._sent(request)
        except OSError as error:  # a time-out is one, too
            _log.debug("a client of the %s went away: %s", self._name, error)

    async def _read(self, connection: socket.socket, peer: str) -> Request | Reply:
        received, most = b"", self._limits.request
        while b"\r\n\r\n" not in received:
            part = await self._loop.sock_recv(connection, most)
            received += part
            if not part or (len(received) > most and b"\r\n\r\n" not in received):
                return Reply.text(400, "not a request\n")
        return parse(received, peer)

    def _made(self, path: str, make: Callable[..., Reply | Later], *arguments: Request) -> Reply | Later:
        try:
            return make(*arguments)
        except Exception:  # noqa: BLE001  (a bug in a page ends neither the server nor what it runs beside)
            _log.exception("%s: %s could not be made", self._name, path)
            return Reply.text(500, f"{path} could not be made; see the log\n")

    async def _wait_for(self, later: Later, path: str, connection: socket.socket, patience: asyncio.Timeout) -> Reply:
        """Return an answer that takes long. Raises ConnectionError when the client leaves."""
        if self._waiting >= self._limits.later:
            return Reply.text(503, "too many requests are waiting; try again in a moment\n", {"Retry-After": "2"})
        now = self._loop.time()
        patience.reschedule(max(now + later.seconds, patience.when() or now))
        making = self._loop.create_task(self._make(later, path))
        leaving = self._loop.create_task(self._leaves(connection))
        self._waiting += 1
        try:
            await asyncio.wait((making, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not making.done():
                raise ConnectionError("it did not wait for its answer")
            patience.reschedule(self._loop.time() + self._limits.seconds)
            return making.result()
        finally:
            self._waiting -= 1
            making.cancel()
            leaving.cancel()

    async def _leaves(self, connection: socket.socket) -> None:
        """Return when a client leaves, of which nothing more may come."""
        with suppress(OSError):
            while await self._loop.sock_recv(connection, _CHUNK):
                pass

    async def _make(self, later: Later, path: str) -> Reply:
        """Have a thread make an answer, once the one before is made, even if nobody waits for that any more."""
        await self._slow.acquire()
        made: asyncio.Future[Reply | Later] = self._loop.create_future()

        def done(reply: Reply | Later) -> None:
            self._slow.release()
            if not made.done():
                made.set_result(reply)

        def make() -> None:
            reply = self._made(path, later.make)
            with suppress(RuntimeError):  # the server is closed
                self._loop.call_soon_threadsafe(done, reply)

        try:
            threading.Thread(target=make, name=f"{self._name}, slow", daemon=True).start()
        except (RuntimeError, MemoryError):
            self._slow.release()
            return Reply.text(503, "not enough memory is left; try again later\n", {"Retry-After": "10"})
        reply = await made
        assert isinstance(reply, Reply)
        return reply


_LEVEL = 1  # of compression: the fastest, which leaves a quarter of the metrics already
# What slow links would carry with every scrape, although no query needs it: the meanings, which docs/metrics.md has,
# and the types of metrics without series.
_NEEDLESS = re.compile(rb"^# HELP .*\n|^# TYPE .*\n(?=# |\Z)", re.MULTILINE)
_REGULARLY = 60.0  # Prometheus asks every minute or more often


class MetricsServer:
    """Runs the web server of a rank.

    `/metrics` is for Prometheus, `/healthz` answers while the process lives, and `/readyz` succeeds once the rank is in
    a group.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        address: tuple[str, int],
        not_ready: Callable[[], str | None],
        limits: Limits = DEFAULT,
    ) -> None:
        """Start the server; a port that is taken causes a warning, not an error.

        `not_ready` returns why the rank is not ready yet, or None.
        """
        self.port: int | None = None
        self._registry, self._not_ready = registry, not_ready
        self._asked = self._told = -math.inf  # when Prometheus last asked; when it asked for what it last got in full
        self._server: WebServer | None = None
        try:
            self._server = WebServer("metrics", address, self._answer, limits, self._sent)
        except OSError as error:
            _log.warning("metrics are not served at %s:%d: %s", *address, error.strerror or error)
            return
        self.port = self._server.port

    def last_look(self, until: Callable[[], bool]) -> None:
        """Wait until Prometheus has asked once more, if it asks regularly, or until `until` returns True."""
        now = time.monotonic()
        if now - self._asked > _REGULARLY:
            return
        deadline = now + _REGULARLY
        while self._told < now and time.monotonic() < deadline and not until():
            time.sleep(0.05)

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.close()

    def _sent(self, request: Request) -> None:
        if request.path == "/metrics":
            self._told = max(self._told, request.time)

    def _metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics in a format that a client accepts, or in the usual one if it asks for what is none."""
        try:
            encoder, kind = choose_encoder(accept)
        except Exception as error:  # noqa: BLE001  (the library fails on what it cannot read in several ways)
            _log.debug("a client of the metrics accepts %r: %s", accept, error)
            encoder, kind = choose_encoder("")
        return _NEEDLESS.sub(b"", encoder(self._registry)), kind

    def _answer(self, request: Request) -> Reply:
        if request.method != "GET":
            return Reply.text(405, "only GET\n")
        if request.path == "/metrics":
            self._asked = request.time
            body, kind = self._metrics(request.headers.get("accept", ""))
            if not gzip_accepted(request.headers.get("accept-encoding", "")):
                return Reply(200, body, kind)
            return Reply(200, gzip.compress(body, _LEVEL), kind, {"Content-Encoding": "gzip"})
        if request.path == "/healthz":
            return Reply.text(200, "alive\n")
        if request.path == "/readyz":
            reason = self._not_ready()
            return Reply.text(200 if reason is None else 503, f"{reason or 'ready'}\n")
        return Reply.text(404, "there are /metrics, /healthz and /readyz\n")
