"""Turns the records of a run's ranks, and the faults that were injected, into numbers; it starts nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a rank's file, without the lines that a killed process left unfinished."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # what was appended after half a line is lost with it
    return found
