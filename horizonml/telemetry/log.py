"""Writes one JSON object per line to one file per rank, and never disturbs training.

Serves /metrics, /healthz and /readyz beside the training, and never disturbs it.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, gzip_accepted

from horizonml.text import escaped
from horizonml.web.server import DEFAULT, Limits, Reply, Request, WebServer

_log = logging.getLogger(__name__)
_FLUSH_SECONDS = 1.0
_MOST_LINE = 64 << 20  # bytes of a record; that of a step's timeline can take some
_KEPT = 1 << 20  # bytes that wait for room on the disk


class JsonLines:
    """Appends records to a file. A full or broken disk delays or loses records, with a warning; training goes on."""

    def __init__(self, path: Path, on_gone: Callable[[], None] = lambda: None) -> None:
        """Open the file at `path`. `on_gone` is called when somebody has deleted it, before it is made again."""
        self._path, self._on_gone = path, on_gone
        self._first = b""  # the record that the file begins with, which tells what the others are of
        self._file: IO[bytes] | None = None
        self._waiting = bytearray()  # what is not in the file yet
        self._broken = False  # whether a warning says so already
        self._flushed = time.monotonic()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            self._warn(error)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; it is on disk within about a second, or after `flush`."""
        if self._file is None:
            return
        line = (json.dumps(record) + "\n").encode()
        self._first = self._first or line
        if len(self._waiting) < _KEPT:
            self._waiting += line
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Pass what was written to the operating system, as far as it takes it."""
        self._flushed = time.monotonic()
        try:
            if self._file is not None and self._is_gone(self._file):
                self._make_again()
            while self._file is not None and self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
            self._broken = False
        except OSError as error:
            self._warn(error)

    def _is_gone(self, file: IO[bytes]) -> bool:
        """Return whether the file is not at its path any more: then what is written to it is lost without an error."""
        try:
            return not os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return True

    def _make_again(self) -> None:
        """Go on in a new file at the same path. Raises OSError."""
        _log.warning(
            "%s was deleted or moved while training: it is made again, and what was recorded before is not in it",
            self._path,
        )
        self._on_gone()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        made = self._path.open("ab", buffering=0)
        if self._file is not None:
            self._file.close()
        self._file = made
        if not self._waiting.startswith(self._first):
            self._waiting[:0] = self._first

    def close(self) -> None:
        """Write what is left, and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _warn(self, error: OSError) -> None:
        if not self._broken:
            _log.warning("records cannot be written to %s: %s", self._path, error.strerror or error)
        self._broken = True


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, except for a line that a crash cut short.

    Their texts may be shown anywhere: control characters in them are written out. Raises ValueError for what is no
    record, and OSError.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MOST_LINE + 1):
            number += 1
            if len(line) > _MOST_LINE:
                raise ValueError(f"line {number} is longer than {_MOST_LINE} bytes")
            if not line.endswith(b"\n"):
                return
            try:
                record = _shown(json.loads(line))
            except RecursionError:
                raise ValueError(f"line {number} is nested too deeply") from None
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON: {error}") from None
            if not isinstance(record, dict):
                raise ValueError(f"line {number} is not an object")
            yield record


def _shown(value: Any) -> Any:
    """Return a value with its texts as they may be shown."""
    if isinstance(value, str):
        return value if value.isprintable() else escaped(value)
    if isinstance(value, list):
        return [_shown(one) for one in value]
    if isinstance(value, dict):
        return {_shown(key): _shown(one) for key, one in value.items()}
    return value


_LEVEL = 1  # of compression: the fastest, which leaves a sixth of the metrics already
_REGULARLY = 60.0  # Prometheus asks every minute or more often


class Server:
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
        """Return the response to a request."""
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
