"""Serves /metrics, /healthz and /readyz beside the training, and never disturbs it.

One thread serves all clients, at most `_MOST_CLIENTS` at a time. Each connection serves one request, within
`_CLIENT_SECONDS` from the request's first byte to the answer's last. When one more client connects, the oldest
connection is dropped, so that clients that are slow on purpose exhaust neither threads nor descriptors, and keep nobody
out.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

_log = logging.getLogger(__name__)
_CLIENT_SECONDS = 5.0  # a connection that lasts longer is dropped
_REGULARLY = 60.0  # Prometheus asks every minute or more often
_MOST_CLIENTS = 32  # at a time
_MOST_WAITING = 256  # connections that the system queues until they are accepted
_MOST_BYTES = 8192  # of a request
_LOOK_SECONDS = 0.5  # the interval between checks for connections that last too long


@dataclass(eq=False)
class _Client:
    """Holds a connection, and how far its request or its answer has come."""

    socket: socket.socket
    deadline: float
    request: bytes = b""
    answer: memoryview = field(default_factory=lambda: memoryview(b""))
    path: str = ""
    asked: float = -math.inf  # when the request was complete


class Server:
    """Runs a small web server in a thread of its own.

    `/metrics` is for Prometheus, `/healthz` answers while the process lives, and `/readyz` succeeds once the rank is in
    a group.
    """

    def __init__(
        self, registry: CollectorRegistry, address: tuple[str, int], not_ready: Callable[[], str | None]
    ) -> None:
        """Start the server; a port that is taken causes a warning, not an error.

        `not_ready` returns why the rank is not ready yet, or None.
        """
        self.port: int | None = None
        self._registry, self._not_ready = registry, not_ready
        self._asked = self._told = -math.inf  # when Prometheus last asked; when it asked for what it last got in full
        self._clients: list[_Client] = []  # the oldest first
        try:
            self._listener = socket.create_server(address, backlog=_MOST_WAITING)
        except OSError as error:
            _log.warning("metrics are not served at %s:%d: %s", *address, error.strerror or error)
            return
        self.port = int(self._listener.getsockname()[1])
        self._listener.setblocking(False)
        self._waker, self._wakes = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

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
        if self.port is not None:
            self._waker.close()
            self._thread.join()

    def _serve(self) -> None:
        closing = False
        while not closing:
            for key, _ in self._selector.select(_LOOK_SECONDS):
                if key.fileobj is self._wakes:
                    closing = True
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._clients:  # it may just have been dropped
                    self._go_on(key.data)
            while self._clients and (closing or self._clients[0].deadline < time.monotonic()):
                self._drop(self._clients[0])
        for open_socket in (self._listener, self._wakes):
            open_socket.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # it went away, or no descriptor is left, and then one is freed
            _log.debug("a client of the metrics could not be accepted: %s", error)
            if self._clients:
                self._drop(self._clients[0])
            else:
                time.sleep(0.05)
            return
        if len(self._clients) >= _MOST_CLIENTS:
            self._drop(self._clients[0])
        connection.setblocking(False)
        client = _Client(connection, time.monotonic() + _CLIENT_SECONDS)
        self._clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _go_on(self, client: _Client) -> None:
        """Read what has arrived of a request, or write what fits of the answer."""
        try:
            if not client.answer:
                received = client.socket.recv(_MOST_BYTES)
                client.request += received
                complete = b"\r\n\r\n" in client.request
                if not complete and received and len(client.request) <= _MOST_BYTES:
                    return
                client.answer = memoryview(self._answer(client) if complete else _response(400, "not a request\n"))
                self._selector.modify(client.socket, selectors.EVENT_WRITE, client)
            client.answer = client.answer[client.socket.send(client.answer) :]
        except BlockingIOError:
            return
        except OSError as error:
            _log.debug("a client of the metrics went away: %s", error)
            self._drop(client)
            return
        if not client.answer:
            if client.path == "/metrics":
                self._told = max(self._told, client.asked)
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._clients.remove(client)
        self._selector.unregister(client.socket)
        client.socket.close()

    def _metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics in a format that a client accepts, or in the usual one if it asks for what is none."""
        try:
            encoder, kind = choose_encoder(accept)
            return encoder(self._registry), kind
        except Exception as error:  # noqa: BLE001  (the library fails on what it cannot read in several ways)
            _log.debug("a client of the metrics accepts %r: %s", accept, error)
            encoder, kind = choose_encoder("")
            return encoder(self._registry), kind

    def _answer(self, client: _Client) -> bytes:
        """Return the response to a complete request."""
        first, *lines = client.request.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _response(400, "not a request\n")
        if words[0] != "GET":
            return _response(405, "only GET\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        client.path = words[1].partition("?")[0]
        if client.path == "/metrics":
            self._asked = client.asked = time.monotonic()
            try:
                return _response(200, *self._metrics(headers.get("accept", "")))
            except Exception:  # noqa: BLE001  (a bug in a metric ends neither the server nor the training)
                _log.exception("the metrics could not be written")
                return _response(500, "the metrics could not be written; see the log\n")
        if client.path == "/healthz":
            return _response(200, "alive\n")
        if client.path == "/readyz":
            reason = self._not_ready()
            return _response(200 if reason is None else 503, f"{reason or 'ready'}\n")
        return _response(404, "there are /metrics, /healthz and /readyz\n")


def _response(status: int, body: str | bytes, kind: str = "text/plain; charset=utf-8") -> bytes:
    """Return a response after which the connection is closed; each further request needs a new one."""
    content = body.encode() if isinstance(body, str) else body
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nServer: horizonml\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content
