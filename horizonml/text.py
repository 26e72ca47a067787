"""Puts numbers, units and suggestions into words."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message that suggests the known word nearest to a mistyped one, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def escaped(text: str) -> str:
    """Return a text that may come from elsewhere as it may be shown on a terminal or in a log.

    Control characters, which could move the cursor, hide what was said or forge a line, become `\\x1b` and the like.
    Further lines are indented, so that none looks like a line of its own.
    """
    lines = (line if line.isprintable() else "".join(map(_plain, line)) for line in text.split("\n"))
    return "\n  ".join(lines).rstrip()


def plain_lines(text: str) -> str:
    """Return a text of several lines as it may be shown; its lines stay as they are, but for control characters."""
    return "\n".join(map(escaped, text.split("\n")))


def _plain(character: str) -> str:
    harmless = character.isprintable() or character == "\t" or unicodedata.category(character) == "Zs"  # a space
    return character if harmless else ascii(character)[1:-1]


def shown(value: object) -> str:
    """Return a value from elsewhere as it may stand in a message: short, on one line, and plain."""
    plain = type(value).__name__ if isinstance(value, dict | list) else ascii(value)
    return plain if len(plain) <= 60 else f"{plain[:60]} ..."


def human_bytes(count: float) -> str:
    """Return a number of bytes with its unit: 1536 becomes "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def human_seconds(seconds: float) -> str:
    """Return a time with its unit: 0.0123 becomes "12.3 ms", and 75 becomes "1 min 15 s"."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def rough_time(seconds: float) -> str:
    """Return a time in its largest unit that fits twice: 119 becomes "119 seconds", and 7300 becomes "2 hours"."""
    for size, unit in ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute")):
        if seconds >= 2 * size:
            return count(round(seconds / size), unit)
    return count(round(seconds), "second")


def count(number: int, thing: str) -> str:
    """Return a number of things, such as "1 epoch" or "1,000 epochs"; the last word must have a regular plural."""
    consonant = thing[-2:-1] not in "aeiou"
    plural = (
        f"{thing[:-1]}ies"
        if thing.endswith("y") and consonant
        else f"{thing}es"
        if thing.endswith(("ch", "s"))
        else f"{thing}s"
    )
    return f"{number:,} {thing if number == 1 else plural}"


def some(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def percent(share: float | None, digits: int | None = None) -> str:
    """Return a share as "12%" or "1.2%", with so many `digits` after the point if given, and "-" for None."""
    if share is None:
        return "-"
    if digits is None:
        digits = 0 if share == 0 or abs(share) >= 0.0995 else 1
    return f"{share:.{digits}%}"


def printable(text: str, most: int = 500) -> str:
    """Return a text from elsewhere on one line, without control characters, for terminals, pages and messages."""
    kept = "".join(character if character.isprintable() else " " for character in text[:most])
    return kept + (" ..." if len(text) > most else "")
