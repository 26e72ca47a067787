"""Links this process to ranks on other machines: through its tunnel, and with a watch on whom it does not reach."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address

from horizonml.comm.work import Moves
from horizonml.errors import PeerLost, RendezvousError
from horizonml.machine.reach import Probe
from horizonml.rendezvous.fingerprint import Fingerprint
from horizonml.security.spec import SecuritySpec
from horizonml.security.token import Token
from horizonml.tunnel.client import Tunnel, TunnelGone
from horizonml.tunnel.links import Links, Peer

_END_SECONDS = 1.0  # for a tunnel to end, which may have other ranks' connections to carry
_STILL_SECONDS = 0.5  # without a message, after which a rank looks whether it reaches the others
_PROBE_SECONDS = 3.5  # for their answers: longer than a link that flaps, or has a long queue, takes
_LOOK_SECONDS = 0.05
_EACH_SECONDS = 0.02  # for each other machine, which the looks at it are apart


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


def _packed(one: Fingerprint) -> bytes:
    """Return a rank's address as gloo compares them, or nothing if it has stated something else."""
    with suppress(ValueError):
        return ip_address(one.address).packed
    return b""


class LinkWatch(threading.Thread):
    """Reports which ranks on other machines this one does not reach while it waits for a message.

    A link that is cut closes no connection: without this, ranks would wait as long as a step may take.
    """

    def __init__(
        self,
        members: Sequence[Fingerprint],
        rank: int,
        tunnelled: bool,
        moves: Moves,
        report: Callable[[Sequence[int]], None],
    ) -> None:
        """Watch the links of the member `rank` to the others; `report` gets ranks as they were started.

        A link is watched from the end that connects, because a firewall may close the other direction: through tunnels
        that is the higher rank, and else gloo lets the higher address connect.
        """
        super().__init__(name="links", daemon=True)
        own = members[rank]
        lower = members[:rank] if tunnelled else [one for one in members if _packed(one) < _packed(own)]
        far = [one for one in lower if one.host_id != own.host_id and _packed(one)]
        self._ranks = {one.rank: (one.address, one.link_port) for one in far}
        self._moves, self._report, self._over = moves, report, threading.Event()
        if far:
            self.start()

    def end(self) -> None:
        """Report nothing more."""
        self._over.set()

    def run(self) -> None:
        """Look until the group is over."""
        pause = max(_STILL_SECONDS, _EACH_SECONDS * len(self._ranks))
        seen, since = self._moves.count, time.monotonic()
        while not self._over.wait(_LOOK_SECONDS):
            if self._moves.count != seen:
                seen, since = self._moves.count, time.monotonic()
            elif time.monotonic() - since >= pause:
                silent = self._silent(seen)
                if silent and not self._over.is_set():
                    self._report(silent)
                since = time.monotonic()

    def _silent(self, seen: int) -> list[int]:
        """Return the ranks that do not answer, as long as no message comes."""
        probe, until = Probe(self._ranks.values()), time.monotonic() + _PROBE_SECONDS
        try:
            while probe.silent and self._moves.count == seen and not self._over.wait(_LOOK_SECONDS):
                if time.monotonic() >= until:
                    return [rank for rank, address in self._ranks.items() if address in probe.silent]
                probe.look()
        finally:
            probe.close()
        return []
