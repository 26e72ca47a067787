"""Finds the addresses and interfaces of this machine, and which of its networks leads to the rendezvous service."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress

import psutil

from horizonml.errors import JobError, RendezvousError

METRICS = "HORIZONML_METRICS"  # environment variable: where ranks serve their metrics
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_chosen: str | None = None  # the interface that this process has set


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of "host:port" or "[::1]:port". Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def metrics_address(text: str | None) -> tuple[str, int] | None:
    """Return the host and the port of --metrics or of $HORIZONML_METRICS, if it is given. Raises JobError."""
    if not text:
        return None
    try:
        host, port = split_address(text)
        if not 0 <= port <= 65535:
            raise ValueError
    except ValueError:
        raise JobError(
            f"--metrics (${METRICS}): {text!r} is not [HOST:]PORT, for example 9400 or 0.0.0.0:9400"
        ) from None
    return host or "127.0.0.1", port


def service_address(text: str) -> tuple[str, int]:
    """Return the host and the port, both of which must be given, of a service. Raises ValueError."""
    host, port = split_address(text)
    if not host or not 0 < port <= 65535:
        raise ValueError(f"{text!r} is not host:port")
    return host, port


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes any free port. Raises RendezvousError if the address is not available."""
    listener = None
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(1024)
    except (OSError, UnicodeError) as error:  # the latter for what cannot be a name, such as a..b
        if listener is not None:
            listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise RendezvousError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from error
    return listener


def route_to(host: str, port: int) -> tuple[str, str]:
    """Return this machine's address and interface from which packets to `host` leave.

    Nothing is sent: connecting a UDP socket only asks the kernel for the route. Raises OSError.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except UnicodeError:  # for what cannot be a name, such as a..b
        raise OSError(f"the name {host} does not resolve") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        own = str(probe.getsockname()[0])
    return own, interface_of(own)


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address. Raises OSError if none has."""
    wanted = address.partition("%")[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == wanted for entry in addresses):
            return str(name)
    raise OSError(f"no network interface has the address {address}")


def address_of(interface: str) -> str:
    """Return the first address of an interface, preferably IPv4. Raises OSError if it has none."""
    entries = psutil.net_if_addrs().get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == family:
                return str(entry.address)
    raise OSError(f"network interface {interface} has no address")


def use_interface(name: str) -> str:
    """Make gloo use an interface, unless the user's GLOO_SOCKET_IFNAME names one, and return the interface in use.

    Each call chooses again, because a device may have moved from a cable to a wireless network since the last call.
    """
    global _chosen
    if os.environ.get(_GLOO_INTERFACE) in (None, _chosen):
        os.environ[_GLOO_INTERFACE] = _chosen = name
    return os.environ[_GLOO_INTERFACE]


def is_loopback(host: str) -> bool:
    """Return whether an address, or the name localhost, is certain to be this machine alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return host.lower().rstrip(".") == "localhost"
