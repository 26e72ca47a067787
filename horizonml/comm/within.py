"""Gives some of a group's ranks a group of their own, which connects the same machines and ends with the larger one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from horizonml.comm.group import Group


class Within(Group):
    """Is the group of some ranks of a larger one, which are numbered anew in their order."""

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        """Connect `ranks`, all of which call this together; a single one has nobody to talk to. Raises PeerLost."""
        self.ranks = tuple(ranks)
        self.hosts = [group.hosts[rank] for rank in ranks]
        self.devices = {place: group.devices[rank] for place, rank in enumerate(ranks) if rank in group.devices}
        self._hosts_known = group._hosts_known
        self.rank, self.world_size, self._timeout = self.ranks.index(group.rank), len(ranks), group.timeout
        self._store, self.links, self.log = None, group.links, None
        self._outbox: dict[int, Tensor] = {}
        self._moves = group._moves
        self._over = group._over
        self._subgroups = {}
        self._closing = []
        self._twins, self._twins_over = [], []
        self._connections = group._connections
        self._world = group.among(self.ranks) if len(ranks) > 1 else None

    def origin(self, rank: int) -> int:
        """See `Group.origin`."""
        return self.ranks[rank]

    def close(self) -> None:
        """Let go of the connections, which the larger group closes."""
        self._world = None
