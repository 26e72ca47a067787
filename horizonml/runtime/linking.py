"""Opens this process's tunnel to other machines, once it is in a group that has ranks on several of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from horizonml.rendezvous.fingerprint import Fingerprint
from horizonml.security.spec import SecuritySpec
from horizonml.security.token import Token
from horizonml.tunnel.client import Tunnel
from horizonml.tunnel.links import Links, Peer

_END_SECONDS = 1.0  # for a tunnel to end, which may have other ranks' connections to carry


class Linking:
    """Holds the tunnel of this process, through all the groups that it is a member of."""

    def __init__(self, security: SecuritySpec, token: Token | None) -> None:
        """Protect links between machines with this token; without one they are as readable as the network is."""
        self._security, self._token = security, token
        self._tunnel: Tunnel | None = None
        self._place = ("", 0)

    def between(self, members: Sequence[Fingerprint], rank: int) -> Links | None:
        """Return the links of a group, None if it needs none. Raises SecurityError if the tunnel cannot be opened."""
        if self._token is None or len({member.host_id for member in members}) == 1:
            return None
        place = members[rank].address, members[rank].link_port
        if self._tunnel is None or place != self._place:  # the machine may be in another network than before
            self.close()
            self._tunnel, self._place = Tunnel(self._token, *place, self._security.encrypt), place
        self._tunnel.ensure()
        return Links([Peer(one.host_id, one.address, one.link_port) for one in members], self._tunnel)

    def counted(self) -> Mapping[str, float]:
        """Return what the tunnel has counted so far, by metric; nothing if there is none."""
        if self._tunnel is None:
            return {}
        usage = self._tunnel.usage()
        return {
            "link_sent_bytes": usage.sent,
            "link_received_bytes": usage.received,
            "link_cpu_seconds": usage.seconds,
            "link_refused": usage.refused,
        }

    def close(self) -> None:
        """Let go of the tunnel."""
        if self._tunnel is not None:
            self._tunnel.close(_END_SECONDS)
            self._tunnel = None
