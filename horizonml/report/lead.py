"""Reads what the rank 0 of each group recorded, as one sequence, whichever process it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from horizonml.errors import HorizonError
from horizonml.telemetry.log import read_lines


def lead_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run's rank 0 in the order of time, every step and evaluation once.

    Of a step that was lost and done again, the last record counts. Raises HorizonError if there are none.
    """
    found: list[dict[str, Any]] = []
    for path in folder.glob("rank-*.jsonl"):
        leads = False
        try:
            for record in read_lines(path):
                if record.get("kind") == "run":
                    leads = record.get("rank", 0) == 0
                if leads and ("time" in record or record.get("kind") == "run"):
                    found.append(record)
        except (OSError, ValueError, AttributeError) as error:
            raise HorizonError(f"{path} cannot be read: {error}") from error
    if not any(record.get("kind") == "step" for record in found):
        raise HorizonError(f"{folder} has no steps of a run that rank 0 recorded (rank-*.jsonl)")
    found.sort(key=lambda record: float(record.get("time", 0.0)))
    last = {_key(record, number): number for number, record in enumerate(found)}
    return [record for number, record in enumerate(found) if last[_key(record, number)] == number]


def _key(record: dict[str, Any], number: int) -> tuple[str, int]:
    """Return what the records of one event have in common; `number` sets apart those that happen only once."""
    kind = str(record.get("kind"))
    return (kind, int(record["step"])) if kind in ("step", "evaluation") else (kind, -number - 1)
