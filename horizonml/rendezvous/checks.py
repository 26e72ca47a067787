"""Checks messages from the network, because anyone who reaches the rendezvous may write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NoReturn

Fields = Mapping[str, object]  # of a JSON object

MOST_RANKS = 4096  # of a world: far more than gloo connects, and few enough to count
MOST_GENERATION = (1 << 53) - 1
_MOST_BYTES = 1 << 16  # of an event; a join takes about 500
_MOST_TEXT = 255  # characters of a name
_MOST_SECONDS = 1e9


def parse(message: bytes, most: int = _MOST_BYTES) -> Fields:
    """Return the fields of a message of at most so many bytes. Raises ValueError."""
    if len(message) > most:
        raise ValueError(f"{len(message)} bytes are too long for a message")

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a number")

    try:
        value = json.loads(message, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    return value


def whole(values: Fields, name: str, low: int, high: int) -> int:
    """Return a whole number from `low` to `high`. Raises ValueError."""
    value = values.get(name)
    if type(value) is not int or not low <= value <= high:  # True would be an int, too
        raise ValueError(f"{name} must be a whole number from {low} to {high}, not {shown(value)}")
    return value


def seconds(values: Fields, name: str) -> float:
    """Return a time in seconds, which is neither negative nor endless. Raises ValueError."""
    value = values.get(name)
    if not isinstance(value, int | float) or not 0 <= value <= _MOST_SECONDS:  # which no NaN is
        raise ValueError(f"{name} must be seconds from 0 to {_MOST_SECONDS:g}, not {shown(value)}")
    return float(value)


def text(values: Fields, name: str) -> str:
    """Return a short printable text. Raises ValueError."""
    value = values.get(name)
    if not isinstance(value, str) or len(value) > _MOST_TEXT or not value.isprintable():
        raise ValueError(f"{name} must be at most {_MOST_TEXT} printable characters, not {shown(value)}")
    return value


def ranks(values: Fields, name: str) -> tuple[int, ...]:
    """Return a list of ranks. Raises ValueError."""
    value = values.get(name)
    if (
        not isinstance(value, list)
        or len(value) > MOST_RANKS
        or not all(type(rank) is int and 0 <= rank < MOST_RANKS for rank in value)
    ):
        raise ValueError(f"{name} must be a list of ranks")
    return tuple(value)


def shown(value: object) -> str:
    """Return a value from the network as it may stand in a message: short, on one line, and plain."""
    plain = type(value).__name__ if isinstance(value, dict | list) else ascii(value)
    return plain if len(plain) <= 60 else f"{plain[:60]} ..."
