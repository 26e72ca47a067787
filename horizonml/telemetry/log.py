"""Writes one JSON object per line to one file per rank, and never disturbs training."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from horizonml.text import escaped

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
