"""The keys through which the ranks of one generation exchange their addresses.

Each key belongs to the rank that sets it first, and no other may change it. What a rank can store is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_KEY = 512  # characters
MOST_VALUE = 190_000  # bytes, which fit a request in base64
_MOST_BYTES = 16 << 20  # of one rank's keys and values
_MOST_ALL = 128 << 20  # bytes of all ranks'
_OVERHEAD = 200  # bytes that a key takes beside its characters, of up to 4 bytes each, and its value


@dataclass
class Keys:
    """The keys of one generation."""

    _values: dict[str, tuple[int, bytes]] = field(default_factory=dict)  # each with its owner's join
    _bytes: dict[int, int] = field(default_factory=dict)  # of each owner
    _all: int = 0  # bytes

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
        more = len(value) - len(before[1]) if before is not None else len(value) + 4 * len(key) + _OVERHEAD
        size = self._bytes.get(owner, 0) + more
        if size > _MOST_BYTES or self._all + more > _MOST_ALL:
            raise ValueError(f"a rank's keys have at most {_MOST_BYTES} bytes, and those of all ranks {_MOST_ALL}")
        self._values[key], self._bytes[owner], self._all = (owner, value), size, self._all + more
