"""Stands between gloo and a group's store, and puts tunnels in the place of other machines' addresses."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from horizonml.tunnel.addresses import own_address, stand_in_address
from horizonml.tunnel.blob import Published, read_blob
from horizonml.tunnel.client import TunnelGone
from horizonml.tunnel.links import Links

_UNUSED = 1  # a port, of a rank that connects to this one


class PublishedAddresses(Store):
    """Passes on what gloo publishes and asks for, where it leads through a tunnel with another address."""

    def __init__(self, store: Store, rank: int, ranks: tuple[int, ...], links: Links | None) -> None:
        """Pass on to `store` what `rank` says, as one of the `ranks` of a process group."""
        super().__init__()
        self._store, self._rank, self._ranks, self._links = store, rank, ranks, links
        self._openings: dict[int, int] = {}  # the number of each opening in the tunnel, by rank
        self.own: list[Published] = []  # what this rank has published, for each network interface
        self._vouchers: list[socket.socket] = []

    def set(self, key: str, value: Any) -> None:
        """Publish this rank's address."""
        content = value.encode("latin-1") if isinstance(value, str) else bytes(value)
        if self._member(key) == self._rank:
            try:
                self.own.append(read_blob(content))
            except ValueError:
                if self._links is not None:
                    raise
            else:
                if self._links is not None:
                    self._vouchers.append(self._links.tunnel.vouch(own_address(self._rank), self.own[-1].port))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return a rank's address, as it is to be reached from here. Raises RuntimeError if it is damaged."""
        blob = bytes(self._store.get(key))
        rank = self._member(key)
        if self._links is None or rank is None or rank == self._rank:
            return blob
        try:
            return self._reachable(rank, read_blob(blob), self._links)
        except ValueError as error:
            raise RuntimeError(f"rank {rank} has published no address that it may have: {error}") from error

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until ranks have published their addresses."""
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether ranks have published their addresses."""
        return bool(self._store.check(keys))

    def add(self, key: str, value: int) -> int:
        """Count."""
        return int(self._store.add(key, value))

    def has_extended_api(self) -> bool:
        """Return False, so that gloo asks for one address at a time."""
        return False

    def failures(self, seconds: float) -> str:
        """Return which ranks could not be reached through the tunnel, and why; empty if all were within `seconds`."""
        if self._links is None or not self._openings:
            return ""
        ranks = {number: rank for rank, number in self._openings.items()}
        try:
            found = self._links.tunnel.failures(list(ranks), seconds)
        except TunnelGone as error:
            return str(error)
        peers = self._links.peers
        return "; ".join(
            f"rank {ranks[number]} is not reached at {peers[ranks[number]].address}:{peers[ranks[number]].port}: {why}"
            for number, why in found.items()
        )

    def forget(self) -> None:
        """Close what nobody has connected to, and let nobody connect any more."""
        while self._vouchers:
            self._vouchers.pop().close()
        if self._links is not None and self._openings:
            self._links.tunnel.forget(list(self._openings.values()))

    def _member(self, key: str) -> int | None:
        """Return the rank whose address a key holds; gloo numbers the ranks of a process group from 0."""
        last = key.rpartition("/")[2]
        return self._ranks[int(last)] if last.isdecimal() and int(last) < len(self._ranks) else None

    def _reachable(self, rank: int, published: Published, links: Links) -> bytes:
        """Return a rank's address as gloo is to see it. Raises ValueError if it is not that rank's."""
        if published.address != own_address(rank) or not published.port:
            raise ValueError(f"{published.address}:{published.port}")
        if not links.far(rank, self._rank):
            return published.blob
        peer, stand_in = links.peers[rank], stand_in_address(rank)
        if rank > self._rank:  # it connects to this one
            return published.moved(stand_in, _UNUSED)
        links.tunnel.ensure()
        target = own_address(rank), published.port
        self._openings[rank], (address, port) = links.tunnel.open(peer.address, peer.port, stand_in, target)
        return published.moved(address, port)
