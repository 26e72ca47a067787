"""Reads durations as people write them: 30s, 10m, 1h30m."""

from __future__ import annotations

import re

from horizonml.errors import JobError

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|min|s|m|h)\s*")


def duration(text: str, option: str, least: float = 0.0) -> float:
    """Return the seconds that an option asks for, which must be more than `least`. Raises JobError."""
    rest, seconds = text.strip().lower(), 0.0
    if re.fullmatch(r"\d+(\.\d+)?", rest):
        raise JobError(f"{option}: {text!r} has no unit; did you mean {rest}s, or {rest}m?")
    while part := _PART.match(rest):
        seconds += float(part[1]) * _UNITS[part[2]]
        rest = rest[part.end() :]
    if rest or not text.strip():
        raise JobError(f"{option}: {text!r} is not a duration, for example 30s, 10m or 1h30m")
    if seconds <= least:
        raise JobError(f"{option}: {text} is too short; it must be longer than {least:g}s")
    return seconds
