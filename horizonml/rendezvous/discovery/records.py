"""Writes what a service announces by mDNS, and checks what others announce: anyone on the network may write it."""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from horizonml.rendezvous.discovery.multicast import Interface, reachable
from horizonml.rendezvous.wire import shown

TYPE = "_horizonml._tcp.local."
MOST_ADDRESSES = 8  # of one service
_FORMAT = "1"  # of the text record
_LABEL_BYTES = 63  # of a part of a DNS name
_MOST_NAME, _MOST_VERSION, _MOST_JOB = 63, 32, 128  # characters
_TOKEN_ID = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class FoundService:
    """A service that announces itself. Nothing of it is proven: who answers at its addresses must show the token.

    `host` is the address to try first, and `addresses` are all of them, the likeliest first. `token_id` is empty where
    the service has no token, and `job` where it does not say.
    """

    name: str
    host: str
    port: int
    token_id: str
    version: str
    job: str
    addresses: tuple[str, ...]


def instance(name: str) -> str:
    """Return a DNS name for a service of a device, which no other service has.

    It begins with the device's name as far as that is safe, for those who look at the network with other tools.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    suffix = f"-{secrets.token_hex(4)}"
    return (plain[: _LABEL_BYTES - len(suffix)].rstrip("-") or "device") + suffix


def text(name: str, token_id: str, version: str, job: str) -> dict[str, str]:
    """Return the text record of a service: all that is announced beside its addresses and its port."""
    shortened = {"name": plain(name, _MOST_NAME), "version": version[:_MOST_VERSION], "job": plain(job, _MOST_JOB)}
    return {"format": _FORMAT, "token": token_id, **shortened}


def plain(text: str, most: int) -> str:
    """Return a text as it may be announced: without control characters, and at most so many characters and bytes."""
    kept = "".join(character if character.isprintable() else "?" for character in text)[:most]
    return kept.encode("utf-8", errors="replace")[:200].decode("utf-8", errors="ignore")


def read(
    properties: Mapping[bytes, bytes | None], port: int | None, addresses: Iterable[str], own: Sequence[Interface]
) -> FoundService:
    """Return the service of a text record, a port and addresses from the network. Raises ValueError.

    `own` are the interfaces of this machine, which say what addresses others can have.
    """
    if _field(properties, "format", 8) != _FORMAT:
        raise ValueError("it is of another kind")
    token_id = _field(properties, "token", 8)
    if token_id and not _TOKEN_ID.fullmatch(token_id):
        raise ValueError(f"its token is called {shown(token_id)}")
    if type(port) is not int or not 1 <= port <= 65535:
        raise ValueError(f"its port is {shown(port)}")
    usable = order(addresses, own)
    if not usable:
        raise ValueError("it has no address that this device could reach")
    name = _field(properties, "name", _MOST_NAME) or usable[0]
    version, job = _field(properties, "version", _MOST_VERSION), _field(properties, "job", _MOST_JOB)
    return FoundService(name, usable[0], port, token_id, version, job, usable)


def order(addresses: Iterable[str], own: Sequence[Interface]) -> tuple[str, ...]:
    """Return the addresses that a device on a local network can have, the likeliest first.

    Those on the networks of this machine come before those behind a router, and IPv4 before IPv6. An address elsewhere
    on the internet is left out, so that nobody on the network can have this device connect there.
    """
    ranked: list[tuple[bool, int, int, str]] = []
    for text in dict.fromkeys(list(addresses)[: 4 * MOST_ADDRESSES]):
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            continue
        if address.is_loopback or address.is_multicast or address.is_unspecified or address.is_reserved:
            continue
        scope = text.partition("%")[2]
        if isinstance(address, ipaddress.IPv6Address) and address.is_link_local and not scope:
            continue  # nobody knows on which link
        near = reachable(text, own)
        if near or (not scope and address.is_private):
            ranked.append((not near, address.version, len(ranked), text))
    return tuple(text for *_, text in sorted(ranked)[:MOST_ADDRESSES])


def distinct(found: Iterable[FoundService]) -> list[FoundService]:
    """Return services by name; where several have one name, the second is called "name-2", and so on."""
    taken: set[str] = set()
    named = []
    for service in sorted(found, key=lambda each: (each.name, each.host, each.port)):
        name, number = service.name, 1
        while name in taken:
            number += 1
            name = f"{service.name}-{number}"
        taken.add(name)
        named.append(replace(service, name=name))
    return named


def _field(properties: Mapping[bytes, bytes | None], name: str, most: int) -> str:
    """Return a field of a text record, or nothing if it is missing. Raises ValueError."""
    raw = properties.get(name.encode()) or b""
    try:
        value = raw.decode()
    except UnicodeDecodeError:
        raise ValueError(f"its {name} is not text") from None
    if len(value) > most or not value.isprintable():
        raise ValueError(f"its {name} is {shown(value)}")
    return value
