"""Writes one JSON object per line to one file per rank, and never disturbs training."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from horizonml.text import escaped

_log = logging.getLogger(__name__)
_FLUSH_SECONDS = 1.0
_MOST_LINE = 64 << 20  # bytes of a record; that of a step's timeline can take some
_KEPT = 1 << 20  # bytes that wait for room on the disk


class JsonLines:
    """Appends records to a file. A full or broken disk delays or loses records, with a warning; training goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
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
        if len(self._waiting) < _KEPT:
            self._waiting += (json.dumps(record) + "\n").encode()
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Pass what was written to the operating system, as far as it takes it."""
        self._flushed = time.monotonic()
        try:
            while self._file is not None and self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
            self._broken = False
        except OSError as error:
            self._warn(error)

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
