"""Writes one JSON object per line to one file per rank, and never disturbs training."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_log = logging.getLogger(__name__)
_FLUSH_SECONDS = 1.0


class JsonLines:
    """Appends records to a file; a full or broken disk ends the recording with a warning, not the training."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._flushed = time.monotonic()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", buffering=1 << 16)
        except OSError as error:
            self._give_up(error)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; it is on disk within about a second, or after `flush`."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record) + "\n")
            if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self.flush()
        except OSError as error:
            self._give_up(error)

    def flush(self) -> None:
        """Pass what was written to the operating system."""
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Write what is left, and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        _log.warning("records are no longer written to %s: %s", self._path, error.strerror or error)
        self._file = None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, except for a line that a crash cut short."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
