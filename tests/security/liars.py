"""Ranks that lie: what they send in place of what is expected, while they themselves go on as if they had not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torch.distributed import Store

from horizonml.comm.expected import Reader, anything
from horizonml.comm.group import Group


class Liar(Group):
    """Sends a lie in place of the first value that `chosen` accepts."""

    def __init__(self, store: Store, rank: int, world_size: int, lie: Any, chosen: Callable[[Any], bool]) -> None:
        super().__init__(store, rank, world_size, 30.0)
        self._lie, self._chosen, self._lied = lie, chosen, False

    def gather_json(self, value: Any, read: Reader[Any] = anything) -> list[Any]:
        """Lie, if it is time to."""
        if self._lied or not self._chosen(value):
            return super().gather_json(value, read)
        self._lied = True
        found = super().gather_json(self._lie)
        found[self.rank] = json.loads(json.dumps(value))
        return [self._read(rank, one, read) for rank, one in enumerate(found)]


def always(value: Any) -> bool:
    """Choose the first value."""
    return True


def member(store: Store, rank: int, world_size: int, lie: str, chosen: Callable[[Any], bool] = always) -> Group:
    """Return the group of an honest rank, or of rank 1, which lies; a lie is JSON text."""
    if rank != 1:
        return Group(store, rank, world_size, 30.0)
    return Liar(store, rank, world_size, json.loads(lie), chosen)
