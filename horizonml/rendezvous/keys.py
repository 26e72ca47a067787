"""The keys through which the ranks of one generation exchange their addresses.

Each key belongs to the rank that sets it first, and no other may change it. What a rank can store is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_KEY = 512  # characters
MOST_VALUE = 190_000  # bytes, which fit a request in base64
_MOST_BYTES = 32 << 20  # of one rank's values
_MOST_KEYS = 20_000  # of one rank


@dataclass
class Keys:
    """The keys of one generation."""

    _values: dict[str, tuple[int, bytes]] = field(default_factory=dict)  # each with its owner's join
    _bytes: dict[int, int] = field(default_factory=dict)  # of each owner
    _count: dict[int, int] = field(default_factory=dict)

    def get(self, key: str) -> bytes | None:
        """Return a value, or None if nobody has set it."""
        found = self._values.get(key)
        return found[1] if found is not None else None

    def set(self, owner: int, key: str, value: bytes) -> None:
        """Set a key of this owner. Raises ValueError if it is another's, or if there is no room."""
        before = self._values.get(key)
        if before is not None and before[0] != owner:
            raise ValueError(f"the key {key!r} belongs to another rank")
        if len(key) > MOST_KEY or not key.isprintable():
            raise ValueError(f"a key has at most {MOST_KEY} printable characters")
        if len(value) > MOST_VALUE:
            raise ValueError(f"a value has at most {MOST_VALUE} bytes, not {len(value)}")
        size = self._bytes.get(owner, 0) + len(value) - (len(before[1]) if before is not None else 0)
        count = self._count.get(owner, 0) + (before is None)
        if size > _MOST_BYTES or count > _MOST_KEYS:
            raise ValueError(f"a rank sets at most {_MOST_KEYS} keys with {_MOST_BYTES} bytes")
        self._values[key], self._bytes[owner], self._count[owner] = (owner, value), size, count
