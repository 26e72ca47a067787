"""Serves /metrics, /healthz and /readyz beside the training, which it never disturbs."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

_log = logging.getLogger(__name__)
_CLIENT_SECONDS = 5.0  # a client that is slower is dropped
_REGULARLY = 60.0  # Prometheus comes every minute or more often
_MOST_CLIENTS = 8  # at a time; more are told to come back


class Server:
    """A small web server in threads of its own.

    `/metrics` is for Prometheus, `/healthz` answers while the process lives, `/readyz` once it is in a formed group.
    """

    def __init__(
        self, registry: CollectorRegistry, address: tuple[str, int], not_ready: Callable[[], str | None]
    ) -> None:
        """`not_ready` says why the rank is not ready yet, or None. A taken port is a warning, not an error."""
        self.port: int | None = None
        self._looked = -math.inf  # when Prometheus last came
        slots = threading.Semaphore(_MOST_CLIENTS)

        def looked() -> None:
            self._looked = time.monotonic()

        class Handler(BaseHTTPRequestHandler):
            timeout = _CLIENT_SECONDS
            protocol_version = "HTTP/1.1"
            server_version = "horizonml"
            sys_version = ""

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if not slots.acquire(blocking=False):
                    self._answer(503, b"busy\n")
                    return
                try:
                    if path == "/metrics":
                        encoder, kind = choose_encoder(self.headers.get("Accept", ""))
                        self._answer(200, encoder(registry), kind)
                        looked()
                    elif path == "/healthz":
                        self._answer(200, b"alive\n")
                    elif path == "/readyz":
                        reason = not_ready()
                        self._answer(200 if reason is None else 503, f"{reason or 'ready'}\n".encode())
                    else:
                        self._answer(404, b"there are /metrics, /healthz and /readyz\n")
                except OSError as error:
                    _log.debug("a client of the metrics went away: %s", error)
                    self.close_connection = True
                finally:
                    slots.release()

            def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                _log.debug(format, *arguments)

        self._server = None
        try:
            self._server = _Quiet(address, Handler)
        except OSError as error:
            _log.warning("metrics are not served at %s:%d: %s", *address, error.strerror or error)
            return
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def last_look(self, until: Callable[[], bool]) -> None:
        """Where Prometheus comes regularly, wait until it has come once more, or `until` says to end."""
        now = time.monotonic()
        if now - self._looked > _REGULARLY:
            return
        deadline = now + _REGULARLY
        while self._looked < now and time.monotonic() < deadline and not until():
            time.sleep(0.05)

    def close(self) -> None:
        """End the service."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a client of the metrics failed: %s", client_address, exc_info=True)
