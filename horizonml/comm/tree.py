"""Sums a few numbers over many ranks in few messages.

Gives some of a group's ranks a group of their own, which connects the same machines and ends with the larger one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horizonml.comm.group import Group
from horizonml.comm.work import Work

_ARITY = 8


class TreeSum:
    """Sums a small vector over some ranks along a tree: up to the first rank, and back down.

    gloo's own all-reduce is a ring, made for large tensors: it sends 4 (n - 1) messages per rank, one after the other.
    A tree sends two per rank, over 2 log(n) hops, which is what counts for a few numbers. The order of summation is
    fixed, so the result is the same bit for bit on every run and on every rank.
    """

    def __init__(self, group: Group, ranks: Sequence[int], tag: int, like: Tensor) -> None:
        """Prepare sums of vectors with the shape and dtype of `like`; `tag` must be unused by anything else."""
        self._group, self._tag = group, tag
        place = ranks.index(group.rank)
        self._parent = ranks[(place - 1) // _ARITY] if place else None
        children = range(_ARITY * place + 1, min(_ARITY * (place + 1), len(ranks) - 1) + 1)
        self._children = [ranks[child] for child in children]
        self._parts = [torch.empty_like(like) for _ in self._children]
        self._total = torch.empty_like(like)
        self._posted: list[Work] = []
        self.messages = len(self._children) + (self._parent is not None)  # sent per sum; as many are received

    def post(self) -> None:
        """Post the receives early, so that an arriving vector finds its destination."""
        if not self._posted:
            sources = list(zip(self._parts, self._children, strict=True))
            if self._parent is not None:
                sources.append((self._total, self._parent))
            self._posted = [self._group.receive(into, peer, self._tag) for into, peer in sources]

    def sum(self, vector: Tensor) -> Tensor:
        """Return the sum of all ranks' vectors; this may be `vector` itself, changed in place."""
        self.post()
        works, self._posted = self._posted, []
        total, sent = vector, []
        for work, part, child in zip(works, self._parts, self._children, strict=False):
            self._group.wait(work, child)
            total += part
        if self._parent is not None:
            sent.append((self._group.send(total, self._parent, self._tag), self._parent))
            self._group.wait(works[-1], self._parent)
            total = self._total
        sent += [(self._group.send(total, child, self._tag), child) for child in self._children]
        for work, peer in sent:
            self._group.wait(work, peer)
        return total


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
