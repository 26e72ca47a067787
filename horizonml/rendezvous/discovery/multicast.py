"""Chooses the network interfaces on which devices look for each other, and tests whether multicast works there."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
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


PORT = 5353
_GROUP4, _GROUP6 = "224.0.0.251", "ff02::fb"
_MULTICAST_ALL = 49  # IP_MULTICAST_ALL of Linux: whether a socket receives what other sockets have asked for
_SEND_AGAIN_SECONDS = 0.3  # a packet may get lost
_MOST_BYTES, _MOST_OTHERS = 9000, 16
# The question which kinds of services there are, which every device that speaks mDNS answers (RFC 6763, section 9).
_QUESTION = b"".join(bytes([len(part)]) + part for part in (b"_services", b"_dns-sd", b"_udp", b"local", b""))
_PTR, _IN = 12, 1


@dataclass(frozen=True)
class Hearing:
    """What was heard on an interface after a question to all: this device's own packet, and answers of others."""

    interface: Interface
    problem: str | None = None  # why this device's own packet did not come back
    others: tuple[str, ...] = ()  # the addresses of devices that were heard

    @property
    def works(self) -> bool:
        """Return whether this device's own packet came back."""
        return self.problem is None


def listen(interfaces: Sequence[Interface], seconds: float = 1.5) -> list[Hearing]:
    """Ask all devices on each interface a question, and return what was heard within some seconds.

    Many networks have no other device that answers, so hearing nobody proves nothing by itself.
    """
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        ears = [_Ear(interface, stack) for interface in interfaces]
        for ear in ears:
            if ear.receiver is not None:
                selector.register(ear.receiver, selectors.EVENT_READ, ear)
        start = time.monotonic()
        sent = -_SEND_AGAIN_SECONDS
        while (passed := time.monotonic() - start) < seconds and selector.get_map():
            if passed - sent >= _SEND_AGAIN_SECONDS:
                sent = passed
                for ear in ears:
                    ear.ask()
            for key, _ in selector.select(min(_SEND_AGAIN_SECONDS, seconds - passed)):
                key.data.hear()
        return [ear.heard() for ear in ears]


class _Ear:
    def __init__(self, interface: Interface, stack: ExitStack) -> None:
        self.interface = interface
        self.receiver: socket.socket | None = None
        self._sender: socket.socket | None = None
        self._packet = (
            struct.pack("!6H", secrets.randbits(16), 0, 1, 0, 0, 0) + _QUESTION + struct.pack("!2H", _PTR, _IN)
        )
        self._own, self._problem = False, "nothing came back"
        self._others: dict[str, None] = {}
        try:
            if interface.ipv4:
                self._open4(interface.ipv4[0], stack)
            elif interface.link_local:
                self._open6(interface.link_local[0], stack)
            else:
                self._problem = "it has neither an IPv4 address nor a link-local IPv6 address"
        except OSError as error:
            self._problem = _reason(error)

    def ask(self) -> None:
        """Send the question to all."""
        if self._sender is None:
            return
        try:
            if self._sender.family == socket.AF_INET:
                self._sender.sendto(self._packet, (_GROUP4, PORT))
            else:
                self._sender.sendto(self._packet, (_GROUP6, PORT, 0, socket.if_nametoindex(self.interface.name)))
        except OSError as error:
            self._problem = f"sending failed: {_reason(error)}"

    def hear(self) -> None:
        """Receive one packet."""
        assert self.receiver is not None
        try:
            packet, sender = self.receiver.recvfrom(_MOST_BYTES)
        except OSError:
            return  # it was damaged
        address = str(sender[0])
        if packet == self._packet:
            self._own = True
        elif address.partition("%")[0] not in self._addresses() and len(self._others) < _MOST_OTHERS:
            self._others[address] = None

    def heard(self) -> Hearing:
        """Return the result."""
        return Hearing(self.interface, None if self._own else self._problem, tuple(self._others))

    def _addresses(self) -> set[str]:
        return {address.partition("%")[0] for address in (*self.interface.ipv4, *self.interface.ipv6)}

    def _open4(self, address: str, stack: ExitStack) -> None:
        receiver, sender = (_reusable(socket.AF_INET, stack) for _ in range(2))
        receiver.bind((_GROUP4, PORT))  # so that it takes nothing that is sent to this machine alone from others
        if sys.platform == "linux":
            receiver.setsockopt(socket.IPPROTO_IP, _MULTICAST_ALL, 0)
        member = socket.inet_aton(_GROUP4) + socket.inet_aton(address)
        receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
        sender.bind((address, PORT))  # others answer to all only what comes from this port
        self.receiver, self._sender = receiver, sender

    def _open6(self, address: str, stack: ExitStack) -> None:
        receiver, sender = (_reusable(socket.AF_INET6, stack) for _ in range(2))
        index = socket.if_nametoindex(self.interface.name)
        receiver.bind((_GROUP6, PORT, 0, index))
        member = socket.inet_pton(socket.AF_INET6, _GROUP6) + struct.pack("@I", index)
        receiver.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, member)
        sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
        sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        sender.bind((address.partition("%")[0], PORT, 0, index))
        self.receiver, self._sender = receiver, sender


def _reusable(family: int, stack: ExitStack) -> socket.socket:
    made = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "SO_REUSEPORT"):
        with contextlib.suppress(OSError):  # a system that knows the name only
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return made


def _reason(error: OSError) -> str:
    if error.errno is not None and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    return str(error)
