"""Finds the lobby that this device is to join: by its announcement, or at the address that the user gave."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from horizonml import __version__
from horizonml.discovery.diagnosis import explain_nobody
from horizonml.discovery.records import Found
from horizonml.discovery.service import browse
from horizonml.errors import JobError, RendezvousError
from horizonml.lobby.settings import Place
from horizonml.machine.network import split_address
from horizonml.text import printable

PORT = 29400
SECONDS = 10.0  # in which a lobby is found, if one is there
_SETTLE_SECONDS = 0.5  # in which a second one may announce itself, too


def at(peer: str) -> Place:
    """Return the place that the user named as HOST or HOST:PORT. Raises JobError."""
    bare = peer.count(":") > 1 and not peer.startswith("[")  # an address of IPv6 without a port
    text = peer if ":" in peer.rpartition("]")[2] and not bare else f"[{peer.strip('[]')}]:{PORT}"
    try:
        host, port = split_address(text)
        if not host or not 0 < port <= 65535:
            raise ValueError
    except ValueError:
        raise JobError(f"--peer: {peer!r} is not HOST or HOST:PORT, for example 192.168.1.10:{PORT}") from None
    return Place(host, (host,), port)


def find(token_id: str, choose: Callable[[Sequence[Found]], Found | None], stop: Callable[[], bool]) -> Place | None:
    """Return the lobby to join, or None if `stop` says so.

    Of several with this device's token, `choose` names one, or None if nobody can be asked. Raises RendezvousError with
    the reasons if there is none.
    """
    first: list[float] = []

    def note(service: Found) -> bool:
        if fits(service, token_id):
            first.append(time.monotonic())
        return False

    def settled() -> bool:
        return stop() or bool(first and time.monotonic() - first[0] > _SETTLE_SECONDS)

    begin = time.monotonic()
    found = browse(SECONDS, note, settled)
    if stop():
        return None
    fitting = [service for service in found if fits(service, token_id)]
    for service in found:
        mark = f" (after {first[0] - begin:.1f} s)" if service in fitting else ", but not for this device"
        print(f"found {words(service)}{mark}", flush=True)
    if not fitting:
        raise RendezvousError(
            f"no run was found within {SECONDS:.0f} s\n{explain_nobody(found, token_id, __version__)}\n"
            "`horizonml join --peer HOST` goes to a device's address without looking for it."
        )
    chosen = fitting[0] if len(fitting) == 1 else choose(fitting)
    if stop():
        return None
    if chosen is None:
        names = "; ".join(f"--peer {service.host}:{service.port} for {words(service)}" for service in fitting)
        raise RendezvousError(f"there are {len(fitting)} runs with this device's token; choose one: {names}")
    return Place(chosen.name, chosen.addresses or (chosen.host,), chosen.port)


def fits(service: Found, token_id: str) -> bool:
    """Return whether this device can join what was found."""
    return service.token_id == token_id and service.version == __version__


def words(service: Found) -> str:
    """Return what was found, for people."""
    job = f", which trains {service.job}" if service.job else ""
    return printable(f"{service.name} at {service.host}:{service.port}{job}")
