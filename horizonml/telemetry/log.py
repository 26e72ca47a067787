"""The files of records: one JSON object per line, in one file per rank. Writing them never disturbs training.

They are read as a whole, where any damage is an error, or as they grow, where what is damaged is counted and skipped.
"""

from __future__ import annotations

import heapq
import json
import logging
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from horizonml.errors import HorizonError
from horizonml.telemetry.fields import Record
from horizonml.telemetry.record import read
from horizonml.text import escaped

_log = logging.getLogger(__name__)
_FLUSH_SECONDS = 1.0
_MOST_LINE = 64 << 20  # bytes of a record; that of a step's timeline can take some
_KEPT = 1 << 20  # bytes that wait for room on the disk
_CHUNK = 1 << 20  # bytes that are read at a time
_LATEST = 1e12  # Unix time


def rank_files(folder: Path) -> dict[int, Path]:
    """Return the files of records in a run's folder, by the rank that the process was started as, in order."""
    named = ((path.stem.partition("-")[2], path) for path in folder.glob("rank-*.jsonl"))
    return dict(sorted((int(rank), path) for rank, path in named if re.fullmatch(r"[0-9]{1,9}", rank)))


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
            self._file = path.open("ab+", buffering=0)
            _drop_unfinished_line(self._file)
        except OSError as error:
            self._warn(error)

    def write(self, record: dict[str, object]) -> None:
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


def _drop_unfinished_line(file: IO[bytes]) -> None:
    """Cut off a last line that an earlier process has not finished, as on a full disk, so that none continues it."""
    end = size = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - _CHUNK)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            end = begin + found + 1
            break
        end = begin
    if end < size:
        file.truncate(end)


def read_lines(path: Path) -> Iterator[dict[str, object]]:
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


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file whose kind is known. Raises HorizonError."""
    try:
        for line in read_lines(path):
            try:
                record = read(line)
            except ValueError as error:
                raise HorizonError(f"{path}: {error}") from None
            if record is not None:
                yield record
    except (OSError, ValueError) as error:
        raise HorizonError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _shown(value: Any) -> Any:
    """Return a value with its texts as they may be shown."""
    if isinstance(value, str):
        return value if value.isprintable() else escaped(value)
    if isinstance(value, list):
        return [_shown(one) for one in value]
    if isinstance(value, dict):
        return {_shown(key): _shown(one) for key, one in value.items()}
    return value


@dataclass
class Tail:
    """Reads one file from where the last reading has ended: whole lines only, and nothing twice."""

    path: Path
    offset: int = 0  # where the next reading begins
    damaged: int = 0  # lines that are no JSON object; they are skipped
    _file: tuple[int, int] | None = None  # which file was read
    _rest: bytes = b""  # of a line that has not ended
    _time: float = 0.0  # of the newest record that has one

    @property
    def is_replaced(self) -> bool:
        """Return whether another file is there now, or this one was cut: what was read of it no longer holds."""
        try:
            now = self.path.stat()
        except OSError:
            return self._file is not None
        return self._file not in (None, (now.st_dev, now.st_ino)) or now.st_size < self.offset

    def read(self, most: float = math.inf) -> Iterator[tuple[float, dict[str, object]]]:
        """Yield the lines that were added, each with its time: that of the line before it if it has none itself.

        What lies beyond about `most` bytes is left for the next reading.
        """
        begun = self.offset
        while self.offset - begun < most and (chunk := self._chunk()):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                record = self._parse(line)
                if record is not None:
                    yield self._time, record
            if len(self._rest) > _MOST_LINE:
                self.damaged, self._rest = self.damaged + 1, b""

    def _chunk(self) -> bytes:
        """Return what comes next in the file, which is open only for that moment; nothing if it cannot be read."""
        try:
            with self.path.open("rb") as file:
                now = os.fstat(file.fileno())
                if not stat.S_ISREG(now.st_mode):
                    return b""
                if self._file is None:
                    self._file = now.st_dev, now.st_ino
                file.seek(self.offset)
                chunk = file.read(_CHUNK)
        except OSError:  # it was moved away, or its disk is gone; `is_replaced` tells
            return b""
        self.offset += len(chunk)
        return chunk

    def _parse(self, line: bytes) -> dict[str, object] | None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            self.damaged += bool(line.strip())
            return None
        when = record.get("time")
        if isinstance(when, int | float) and 0 <= when < _LATEST:
            self._time = float(when)
        return record


class Tails:
    """Reads the files of all ranks in a run's folder as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, Tail] = {}  # by the rank that the process was started as

    @property
    def damaged(self) -> int:
        """Return how many lines were skipped."""
        return sum(tail.damaged for tail in self._files.values())

    @property
    def is_replaced(self) -> bool:
        """Return whether the run was begun anew, so that all must be read again."""
        return any(tail.is_replaced for tail in self._files.values())

    def read(self) -> Iterator[tuple[int, dict[str, object]]]:
        """Yield the lines that were added to any file, in the order of time, with the rank whose file it is."""
        for rank, path in rank_files(self._folder).items():
            self._files.setdefault(rank, Tail(path))
        added = (self._labelled(rank, tail) for rank, tail in sorted(self._files.items()))
        for _, rank, line in heapq.merge(*added, key=itemgetter(0)):
            yield rank, line

    def _labelled(self, rank: int, tail: Tail) -> Iterator[tuple[float, int, dict[str, object]]]:
        for when, line in tail.read():
            yield when, rank, line
