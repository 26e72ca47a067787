"""What a group is told of its ranks' machines, so that it can connect those on different ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horizonml.tunnel.client import Tunnel


@dataclass(frozen=True)
class Peer:
    """Says which machine a rank of a group runs on, and where that machine's tunnel accepts connections."""

    host_id: str
    address: str
    port: int


@dataclass(frozen=True)
class Links:
    """Holds the peers of a group in the order of their ranks, this rank among them, and this rank's tunnel."""

    peers: Sequence[Peer]
    tunnel: Tunnel

    def far(self, one: int, other: int) -> bool:
        """Return whether two ranks are on different machines."""
        return self.peers[one].host_id != self.peers[other].host_id
