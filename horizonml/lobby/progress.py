"""Reads how far a training is from the records that this device's rank writes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

_LINE_SECONDS = 10.0
_MOST_BYTES = 4 << 20  # read at a time


class Progress:
    """Follows the records of a rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Follow what the rank writes into the run's folder from now on."""
        self._path = folder / f"rank-{rank}.jsonl"
        self._place = self._path.stat().st_size if self._path.exists() else 0
        self._rest = b""
        self._told = 0.0
        self.first: float | None = None  # when the first step was done, in seconds since 1970
        self.step = 0

    def look(self) -> str | None:
        """Return a line about the training now and then, and None otherwise."""
        last: dict[str, Any] | None = None
        for record in self._new():
            if record.get("kind") == "step":
                last = record
                self.first = self.first or float(record["time"])
        if last is None:
            return None
        now = time.monotonic()
        self.step = int(last["step"])
        if now - self._told < _LINE_SECONDS:
            return None
        self._told = now
        return f"step {self.step}, loss {last['loss']:.4f}, {last['batch'] / last['wall']:,.0f} samples/s"

    def _new(self) -> list[dict[str, Any]]:
        """Return the records that have been written since the last look."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._place:  # an earlier run was moved away
                    self._place = 0
                file.seek(self._place)
                content = self._rest + file.read(_MOST_BYTES)
                self._place = file.tell()
        except OSError:
            return []
        *lines, self._rest = content.split(b"\n")
        return [json.loads(line) for line in lines if line]
