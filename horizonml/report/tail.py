"""Reads files of records while they are written: whole lines only, in the order of time, and nothing twice."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20  # bytes that are read at a time
_LATEST = 1e12  # Unix time
_LONGEST = 1 << 24  # bytes of a line; a longer one is damaged

Line = dict[str, Any]


@dataclass
class Tail:
    """Reads one file from where the last reading has ended."""

    path: Path
    damaged: int = 0  # lines that are no JSON object; they are skipped
    _offset: int = 0
    _file: tuple[int, int] | None = None  # which file was read
    _rest: bytes = b""  # of a line that has not ended
    _time: float = field(default=0.0, repr=False)  # of the newest record that has one

    @property
    def is_replaced(self) -> bool:
        """Return whether another file is there now, or this one was cut: what was read of it no longer holds."""
        try:
            now = self.path.stat()
        except OSError:
            return self._file is not None
        return self._file not in (None, (now.st_dev, now.st_ino)) or now.st_size < self._offset

    def read(self) -> Iterator[tuple[float, Line]]:
        """Yield the records that were added, each with its time: that of the record before it if it has none itself."""
        while chunk := self._chunk():
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                record = self._parse(line)
                if record is not None:
                    yield self._time, record
            if len(self._rest) > _LONGEST:
                self.damaged, self._rest = self.damaged + 1, b""

    def _chunk(self) -> bytes:
        """Return what comes next in the file, which is open only for that moment; nothing if it cannot be read."""
        try:
            with self.path.open("rb") as file:
                if self._file is None:
                    now = self.path.stat()
                    self._file = now.st_dev, now.st_ino
                file.seek(self._offset)
                chunk = file.read(_CHUNK)
        except OSError:  # it was moved away, or its disk is gone; `is_replaced` tells
            return b""
        self._offset += len(chunk)
        return chunk

    def _parse(self, line: bytes) -> Line | None:
        try:
            record = json.loads(line, parse_constant=lambda constant: None)  # what is no number is not known
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
    """Reads the files of all ranks in a run's folder."""

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

    def read(self) -> Iterator[tuple[int, Line]]:
        """Yield the records that were added to any file, in the order of time, with the rank whose file it is."""
        for path in self._folder.glob("rank-*.jsonl"):
            number = path.stem.partition("-")[2]
            if number.isdecimal():
                self._files.setdefault(int(number), Tail(path))
        added = (self._labelled(rank, tail) for rank, tail in sorted(self._files.items()))
        for _, rank, record in heapq.merge(*added, key=itemgetter(0)):
            yield rank, record

    def _labelled(self, rank: int, tail: Tail) -> Iterator[tuple[float, int, Line]]:
        for when, record in tail.read():
            yield when, rank, record
