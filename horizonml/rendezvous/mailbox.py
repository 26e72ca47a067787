"""Carries messages between ranks and the rendezvous service, through the store that the service holds.

PyTorch's store lets anyone who reaches it write anything, so whatever comes out of it is checked before it is used (see
`messages`). Reading never waits, and never makes the store itself parse a value, because its `add` drops the caller's
connection over a value that is no number.
"""

from __future__ import annotations

import json

from torch.distributed import QueueEmptyError, Store

from horizonml.rendezvous.checks import Fields

_EVENTS = "events"
_ABSENT = "\0absent"


def post(store: Store, event: Fields) -> None:
    """Send an event to the service. Raises RuntimeError if the store is gone."""
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
