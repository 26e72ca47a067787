"""Finds the address by which other devices reach this one."""

from __future__ import annotations

from collections import Counter

from horizonml.discovery.interfaces import usable
from horizonml.lobby.lobby import Guest
from horizonml.machine.network import route_to


def host_of(guest: Guest) -> str:
    """Return the address of a device, without its port."""
    return guest.address.rpartition(":")[0].strip("[]") or guest.address


def own_address(guests: list[Guest], host: str) -> str:
    """Return the address of this device by which most of the others reach it."""
    if host not in ("", "0.0.0.0", "::"):  # noqa: S104
        return host
    found: Counter[str] = Counter()
    for guest in guests:
        try:
            found[route_to(host_of(guest), 9)[0]] += 1
        except OSError:
            continue
    if found:
        return found.most_common(1)[0][0]
    return next((address for interface in usable() for address in interface.ipv4), "127.0.0.1")
