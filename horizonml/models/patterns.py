"""Selects parameters and layers by globs on their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from horizonml.errors import ModelError
from horizonml.text import nearest


def selected(patterns: Sequence[str], name: str) -> bool:
    """Return whether the patterns select a name.

    A pattern also matches what lies beneath the module that it names. One that begins with `!` excludes names; later
    patterns override earlier ones. If all of them exclude, everything else is selected.
    """
    found = bool(patterns) and all(pattern.startswith("!") for pattern in patterns)
    for pattern in patterns:
        if _matches(pattern.removeprefix("!"), name):
            found = not pattern.startswith("!")
    return found


def select(patterns: Sequence[str], names: Iterable[str], field: str, what: str) -> list[str]:
    """Return the names that the patterns select; `field` is the job's field that has them, and `what` is selected.

    Raises ModelError for a pattern that matches none of the names, with the nearest one.
    """
    known = list(names)
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        if not any(_matches(bare, name) for name in known):
            raise ModelError(f"{field}: {pattern!r} matches no {what}{_nearest(bare, known)}")
    return [name for name in known if selected(patterns, name)]


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """Return the end of an error message that names what the pattern may have meant."""
    stem = pattern.rstrip("*").rstrip(".")
    parts = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
    return nearest(stem, sorted(parts)) or f"; the names are {', '.join(names[:3])}, ..."
