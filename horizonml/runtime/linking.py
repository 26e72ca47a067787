"""Opens this process's tunnel to other machines, once it is in a group that has ranks on several of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from horizonml.errors import PeerLost, RendezvousError
from horizonml.rendezvous.fingerprint import Fingerprint
from horizonml.security.spec import SecuritySpec
from horizonml.security.token import Token
from horizonml.tunnel.client import Tunnel, TunnelGone
from horizonml.tunnel.links import Links, Peer

_END_SECONDS = 1.0  # for a tunnel to end, which may have other ranks' connections to carry


class Linking:
    """Holds the tunnel of this process, through all the groups that it is a member of."""

    def __init__(self, security: SecuritySpec, token: Token | None) -> None:
        """Protect links between machines with this token; without one they are as readable as the network is."""
        self._security, self._token = security, token
        self._tunnel: Tunnel | None = None
        self._place = ("", 0)
        self._failed = False  # the last time

    def between(self, members: Sequence[Fingerprint], rank: int) -> Links | None:
        """Return the links of a group, None if it needs none.

        Raises SecurityError if the port cannot be had, and PeerLost if the tunnel's process cannot be started: it may
        have been killed, or the machine may be busy for a moment, so the ranks meet again. The second time in a row
        that is a RendezvousError, so that the others go on without this rank.
        """
        if self._token is None or len({member.host_id for member in members}) == 1:
            return None
        place = members[rank].address, members[rank].link_port
        try:
            tunnel = self._open(self._token, place)
        except (TunnelGone, OSError) as error:
            words = f"this machine cannot be linked to the others: {error}"
            if not self._failed:
                self._failed = True
                raise PeerLost(words) from error
            raise RendezvousError(
                f"{words}; that was the second time in a row, and this machine may be out of memory or processor time. "
                "Let it do less beside the training, or start fewer ranks on it, and start this one again"
            ) from error
        self._failed = False
        return Links([Peer(one.host_id, one.address, one.link_port) for one in members], tunnel)

    def _open(self, token: Token, place: tuple[str, int]) -> Tunnel:
        """Return the tunnel, which serves at this place. Raises SecurityError, TunnelGone."""
        if self._tunnel is None or place != self._place:  # the machine may be in another network than before
            self.close()
            self._tunnel, self._place = Tunnel(token, *place, self._security.encrypt), place
        else:
            self._tunnel.ensure()
        return self._tunnel

    def counted(self) -> Mapping[str, float]:
        """Return what the tunnel has counted so far, by metric; nothing if there is none."""
        tunnel = self._tunnel  # which the rank's own thread may let go of meanwhile
        if tunnel is None:
            return {}
        usage = tunnel.usage()
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
