"""Messages between ranks and the rendezvous service, through the store that the service holds.

PyTorch's store lets anyone who reaches it write anything, so whatever comes out of it is checked before it is used:
its size before it is parsed, and that it is plain JSON. Reading never waits, and never makes the store itself parse a
value: its `add` drops the caller's connection over a value that is no number.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from torch.distributed import QueueEmptyError, Store

_EVENTS = "events"
_MOST_BYTES = 1 << 16  # of an event; a join takes about 500
_ABSENT = "\0absent"


def post(store: Store, event: dict[str, Any]) -> None:
    """Send an event to the service."""
    store.queue_push(_EVENTS, json.dumps(event))


def take(store: Store) -> bytes | None:
    """Return the next event, or None if there is none."""
    try:
        event: bytes = store.queue_pop(_EVENTS, False)
    except QueueEmptyError:
        return None
    return event


def peek(store: Store, key: str) -> bytes | None:
    """Return a value, or None if there is none, without waiting for it."""
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)  # writes nothing where the key is absent
    return None if value == _ABSENT.encode() else value


def parse(message: bytes, most: int = _MOST_BYTES) -> dict[str, Any]:
    """Return a message as plain values. Raises ValueError."""
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


def printable(text: str, most: int = 500) -> str:
    """Return a text from the network on one line, without control characters, for logs and messages."""
    kept = "".join(character if character.isprintable() else " " for character in text[:most])
    return kept + (" ..." if len(text) > most else "")
