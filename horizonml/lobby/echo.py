"""Measures the link to the lobby: its delay, and its rates in both directions."""

from __future__ import annotations

import time
from collections.abc import Callable

from horizonml.lobby.messages import MOST_CHUNK, Link
from horizonml.rendezvous.checks import Fields

_ROUNDS, _SECONDS = 8, 0.5  # of messages in each direction, and how long they take at most


def measure(ask: Callable[[Fields], Fields]) -> Link:
    """Return what messages to the lobby and back have shown.

    On a fast link that is what TLS and the two processors manage, so it is a lower bound; on a slow one it is the link.
    """
    delay = min(_timed(ask, "", 0) for _ in range(4))
    return Link(_rate(ask, "0" * MOST_CHUNK, 0, delay), _rate(ask, "", MOST_CHUNK, delay), delay)


def _rate(ask: Callable[[Fields], Fields], payload: str, back: int, delay: float) -> float:
    """Return the bytes per second of some messages, less the delay that each of them has anyway."""
    size = seconds = 0.0
    for _ in range(_ROUNDS):
        taken = _timed(ask, payload, back)
        size, seconds = size + MOST_CHUNK, seconds + max(taken - delay, taken / 10)
        if seconds > _SECONDS:
            break
    return size / seconds


def _timed(ask: Callable[[Fields], Fields], payload: str, back: int) -> float:
    """Return the seconds of one message and its reply."""
    begin = time.perf_counter()
    ask({"do": "echo", "payload": payload, "back": back})
    return time.perf_counter() - begin
