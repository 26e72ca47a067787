"""Serves /metrics, /healthz and /readyz beside the training, and never disturbs it."""

from __future__ import annotations

import gzip
import logging
import math
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, gzip_accepted

from horizonml.telemetry.http import DEFAULT, Limits, Reply, Request, WebServer

_log = logging.getLogger(__name__)
_LEVEL = 1  # of compression: the fastest, which leaves a sixth of the metrics already
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
            return encoder(self._registry), kind
        except Exception as error:  # noqa: BLE001  (the library fails on what it cannot read in several ways)
            _log.debug("a client of the metrics accepts %r: %s", accept, error)
            encoder, kind = choose_encoder("")
            return encoder(self._registry), kind

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
