"""Chooses the network interfaces on which devices look for each other."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# What Docker, Podman, libvirt, LXC and Kubernetes create: networks within this machine, where no other device is.
# OpenWrt calls its real network br-lan.
_VIRTUAL = re.compile(r"(docker|veth|br-(?!lan$)|virbr|vnet|lxcbr|lxdbr|podman|cni|cali|flannel|cilium|kube-)")


@dataclass(frozen=True)
class Interface:
    """A network interface that is up, with its addresses; the link-local ones of IPv6 are "fe80::1%eth0"."""

    name: str
    ipv4: tuple[str, ...] = ()
    ipv6: tuple[str, ...] = ()
    networks: tuple[Network, ...] = ()  # the networks that are at the other end of its cable
    multicast: bool = True  # whether the system would send packets to groups on it

    @property
    def virtual(self) -> bool:
        """Return whether only containers and virtual machines of this machine can be on it."""
        return _VIRTUAL.match(self.name) is not None

    @property
    def link_local(self) -> tuple[str, ...]:
        """Return its link-local addresses of IPv6."""
        return tuple(address for address in self.ipv6 if "%" in address)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses at which others on its network reach this machine.

        Routable addresses of IPv6 are named only where there are none of IPv4: they change often, and outlive no move
        to another network.
        """
        return (*self.ipv4, *self.link_local) if self.ipv4 else self.ipv6

    def listening(self, host: str) -> tuple[str, ...]:
        """Return those of its addresses at which others reach a service that listens at `host`: `::` is any address."""
        if host == "::":
            return self.addresses
        if host == "0.0.0.0":  # noqa: S104  (any address of IPv4)
            return self.ipv4
        bare = host.partition("%")[0]
        return tuple(address for address in (*self.ipv4, *self.ipv6) if address.partition("%")[0] == bare)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.addresses)})"


def interfaces() -> list[Interface]:
    """Return the interfaces that are up and have an address that is not a loopback address."""
    found = read_interfaces(psutil.net_if_addrs(), psutil.net_if_stats())
    checked = [replace(interface, ipv6=tuple(filter(_is_ready, interface.ipv6))) for interface in found]
    return [interface for interface in checked if interface.ipv4 or interface.ipv6]


def read_interfaces(addresses: Mapping[str, Iterable[Any]], states: Mapping[str, Any]) -> list[Interface]:
    """Return the same for what psutil says of a machine's interfaces."""
    found = []
    for name, entries in addresses.items():
        state = states.get(name)
        if state is None or not state.isup:
            continue
        flags = str(getattr(state, "flags", "")).split(",")
        ipv4: list[str] = []
        ipv6: list[str] = []
        networks: list[Network] = []
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = ipaddress.ip_address(str(entry.address).partition("%")[0])
            if address.is_loopback or address.is_unspecified:
                continue
            if isinstance(address, ipaddress.IPv4Address):
                ipv4.append(str(address))
            else:
                ipv6.append(f"{address}%{name}" if address.is_link_local else str(address))
            networks.extend(_network(str(address), entry.netmask))
        if ipv4 or ipv6:
            multicast = flags == [""] or "multicast" in flags
            found.append(Interface(name, tuple(ipv4), tuple(ipv6), tuple(networks), multicast))
    return sorted(found, key=lambda interface: interface.name)


def choose(found: Sequence[Interface]) -> list[Interface]:
    """Return those of some interfaces on which other devices can be.

    Interfaces of containers are left out, unless there are no others.
    """
    return [interface for interface in found if not interface.virtual] or list(found)


def usable() -> list[Interface]:
    """Return the interfaces of this machine on which other devices can be."""
    return choose(interfaces())


def reachable(address: str, found: Sequence[Interface]) -> bool:
    """Return whether an address belongs to a network of an interface, so that packets to it go no further."""
    bare, _, scope = address.partition("%")
    parsed = ipaddress.ip_address(bare)
    if scope:
        return any(interface.name == scope for interface in found)
    return any(parsed in network for interface in found for network in interface.networks)


def _is_ready(address: str) -> bool:
    """Return whether an address of IPv6 can be used, as it can be only some time after its interface is up."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0][4])
    except OSError:
        return False
    return True


def _network(address: str, netmask: str | None) -> list[Network]:
    """Return the network of an address with a mask such as 255.255.255.0 or ffff:ffff::, or nothing if it has none."""
    if not netmask:
        return []
    try:
        mask = ipaddress.ip_address(netmask.partition("/")[0])
        bits = f"{int(mask):b}".count("1")
        return [ipaddress.ip_network(f"{address}/{bits}", strict=False)]
    except ValueError:
        return []
