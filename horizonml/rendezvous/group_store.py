"""The store through which PyTorch's process groups exchange addresses, backed by the rendezvous service."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from horizonml.rendezvous.checks import Fields
from horizonml.rendezvous.client import ServiceError
from horizonml.rendezvous.contact import ANSWER_SECONDS, Contact

_HOLD_SECONDS = 0.2  # that the service holds a request; meanwhile no other thread can use the connection


class GroupStore(Store):
    """The keys of one generation. A key belongs to the rank that sets it; what cannot be done raises RuntimeError."""

    def __init__(self, contact: Contact, timeout: float = 300.0) -> None:
        """Ask through `contact`; a key that is not there is awaited for `timeout` seconds."""
        super().__init__()
        self._contact, self._seconds = contact, timeout

    @property
    def port(self) -> int:
        """Return the port of the service, whose connections do not belong to the group."""
        return self._contact.endpoint.port

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key of this rank."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._contact.ask({"do": "set", "key": key, "value": base64.b64encode(content).decode()})

    def get(self, key: str) -> bytes:
        """Return a value as soon as it is there."""
        (value,) = self._await([key], self._seconds)
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values as soon as they are there."""
        return self._await(keys, self._seconds)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return as soon as all keys are there."""
        self._await(keys, self._seconds if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        answer = self._ask(keys, 0.0, check=True).get("there")
        return isinstance(answer, list) and len(answer) == len(keys) and all(one is True for one in answer)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long keys are awaited."""
        self._seconds = timeout.total_seconds()

    def _await(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic()
            values = self._ask(keys, max(0.0, min(_HOLD_SECONDS, left))).get("values")
            if not isinstance(values, list) or len(values) != len(keys):
                raise ServiceError("the rendezvous service sent other keys than were asked for")
            missing = [key for key, value in zip(keys, values, strict=True) if not isinstance(value, str)]
            if not missing:
                return [base64.b64decode(value) for value in values]
            if left <= 0:
                raise ServiceError(f"{missing[0]} was not set by any rank within {seconds:.0f} s")

    def _ask(self, keys: Sequence[str], hold: float, check: bool = False) -> Fields:
        return self._contact.ask({"do": "get", "keys": list(keys), "seconds": hold, "check": check}, ANSWER_SECONDS)
