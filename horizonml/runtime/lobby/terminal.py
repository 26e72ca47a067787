"""Reads what a person types, without losing sight of whether this process is to end."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable


def is_there() -> bool:
    """Return whether somebody can be asked."""
    return sys.stdin.isatty()


def typed(seconds: float) -> str | None:
    """Wait for some seconds, and return the line that was typed, or None if there was none."""
    if not is_there():
        time.sleep(seconds)
        return None
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    line = sys.stdin.readline() if readable else ""
    return line.strip() if line.endswith("\n") else None


def answer(question: str, stop: Callable[[], bool]) -> str | None:
    """Ask, and return what was answered, or None if `stop` says so before or nobody can be asked."""
    if not is_there():
        return None
    print(f"{question} ", end="", flush=True)
    while not stop():
        line = typed(0.1)
        if line is not None:
            return line
    print(flush=True)
    return None
