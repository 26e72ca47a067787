"""Finds the addresses and interfaces of this machine, and which of them reach a service or another rank.

It also confines the rank of a job that came over the network to the servers that it may fetch files from. Such a job
may name servers on the internet and the device that offers the job. Every address is checked when a connection is
made, so neither a name that resolves to a private address nor a redirect leads into the network behind this device. A
rank is confined by an environment variable, which the processes that it starts inherit.
"""

from __future__ import annotations

import errno
import http.client
import ipaddress
import os
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import psutil

from horizonml.errors import JobError, RendezvousError
from horizonml.machine.relay import bound, is_relayed, used

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
        family, _, _, _, target = socket.getaddrinfo(bound(host), port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(1024)
    except (OSError, UnicodeError) as error:  # the latter for what cannot be a name, such as a..b
        if listener is not None:
            listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        advice = "choose another --host or --port"
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            advice = f"perhaps another `horizonml up` runs on this machine; stop it, or {advice}"
        raise RendezvousError(f"cannot listen on {host}:{port}: {reason}; {advice}") from error
    return listener


def route_to(host: str, port: int) -> tuple[str, str]:
    """Return this machine's address and interface from which packets to `host` leave.

    Nothing is sent: connecting a UDP socket only asks the kernel for the route. To a device at a relay, the address is
    that by which this device is known there. Raises OSError.
    """
    relay = used()
    if relay is not None and is_relayed(host):
        return relay.own, route_to(relay.host, relay.port)[1]
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except UnicodeError:  # for what cannot be a name, such as a..b
        raise OSError(f"the name {host} does not resolve") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        own = str(probe.getsockname()[0])
    return own, interface_of(own)


def rate_to(host: str, port: int) -> int:
    """Return the rate in Mbit/s at which this machine's interface towards `host` is connected.

    It is 0 where the system does not say, as of most wireless interfaces, and where no route leads there.
    """
    try:
        return int(psutil.net_if_stats()[route_to(host, port)[1]].speed)
    except (OSError, KeyError):
        return 0


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


Address = tuple[str, int]
_AGAIN_SECONDS = 0.5  # between two attempts, as each of them may get lost on a bad network
_ANSWERS = (errno.ECONNREFUSED, errno.ECONNRESET)


class AddressProbe:
    """Tries to connect to some addresses until each has answered; that it refuses is an answer, too."""

    def __init__(self, addresses: Collection[Address]) -> None:
        self.addresses = frozenset(addresses)
        self.silent = set(self.addresses)  # which have not answered yet
        self.refused: set[Address] = set()  # where the machine answered that nobody listens
        self._attempts: dict[socket.socket, Address] = {}
        self._next = 0.0

    def look(self) -> None:
        """Take note of answers, and try again now and then; never waits."""
        for attempt, address in list(self._attempts.items()):
            if address not in self.silent or self._is_over(attempt, address):
                del self._attempts[attempt]
                attempt.close()
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _AGAIN_SECONDS
            for address in self.silent:
                self._try(address)

    def close(self) -> None:
        """End all attempts."""
        for attempt in self._attempts:
            attempt.close()
        self._attempts.clear()

    def _try(self, address: Address) -> None:
        attempt, relay = None, used() if is_relayed(address[0]) else None
        with suppress(OSError):  # no way there, or no descriptor is left for the moment
            where = (relay.host, relay.port) if relay is not None else address  # of what is behind it, nothing is seen
            attempt = socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET)
            attempt.setblocking(False)
            error = attempt.connect_ex(where)
            if error in (0, errno.EINPROGRESS):
                self._attempts[attempt] = address
                return
            if error in _ANSWERS:
                self._answered(address, error)
        if attempt is not None:
            attempt.close()

    def _is_over(self, attempt: socket.socket, address: Address) -> bool:
        """Return whether an attempt has ended, and take note of an answer."""
        error = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not error:
            try:
                attempt.getpeername()
            except OSError:
                return False
        if not error or error in _ANSWERS:
            self._answered(address, error)
        return True

    def _answered(self, address: Address, error: int) -> None:
        self.silent.discard(address)
        if error == errno.ECONNREFUSED:
            self.refused.add(address)


FETCH_FROM = "HORIZONML_FETCH_FROM"  # the private addresses that a confined rank may fetch from, separated by commas
CONFINED_BYTES = 16 << 30  # of everything that jobs from the network have fetched, for each kind of file
SPARE_BYTES = 256 << 20  # of the disk that downloads leave free, however long they go on
_MOST_REDIRECTIONS = 5
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
Destination = ipaddress.IPv4Address | ipaddress.IPv6Address


class Forbidden(PermissionError):
    """Raised instead of a connection that a confined rank must not make."""


def is_confined() -> bool:
    """Return whether this process works on a job that came over the network."""
    return FETCH_FROM in os.environ


def may_fetch_from(address: str, allowed: str) -> bool:
    """Return whether an address is on the internet, or one of those `allowed`, which are separated by commas."""
    try:
        found = _unwrapped(ipaddress.ip_address(address.partition("%")[0]))
        own = {_unwrapped(ipaddress.ip_address(text.partition("%")[0])) for text in allowed.split(",") if text}
    except ValueError:
        return False
    return found in own or (found.is_global and not found.is_multicast and not found.is_reserved)


def _unwrapped(address: Destination) -> Destination:
    """Return the IPv4 address that an address of IPv6 leads to, if there is one inside it."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1] or address


def reason(text: str) -> str:
    """Return why a download has failed, for an error that other devices may read.

    A confined rank says it on its own terminal only: the answer of a server is none of the business of the job's owner.
    """
    if not is_confined():
        return text
    print(f"the job's download failed: {text}", file=sys.stderr, flush=True)
    return "that device says why on its own terminal"


def urlopen(url: str, seconds: float) -> Any:
    """Return the answer to a GET request by HTTP or HTTPS. Raises OSError, or http.client.HTTPException."""
    director = urllib.request.OpenerDirector()
    handlers: list[urllib.request.BaseHandler] = [
        urllib.request.UnknownHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirections(),
        urllib.request.HTTPErrorProcessor(),
        _Http(),
        _Https(),
    ]
    if not is_confined():  # a proxy would connect to any address
        handlers.append(urllib.request.ProxyHandler())
    for handler in handlers:
        director.add_handler(handler)
    return director.open(url, timeout=seconds)


class _Redirections(urllib.request.HTTPRedirectHandler):
    max_redirections = _MOST_REDIRECTIONS


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_checked(http.client.HTTPConnection), request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_checked(http.client.HTTPSConnection), request)


def _checked(kind: Callable[..., Any]) -> Any:
    """Return what makes connections of a kind, whose addresses are checked."""

    def make(host: str, **options: Any) -> Any:
        connection = kind(host, **options)
        connection._create_connection = _connect
        return connection

    return make


def _connect(address: tuple[str, int], timeout: float, source_address: None = None) -> socket.socket:
    """Return a connection to the first address of a host that answers, as `socket.create_connection` does."""
    problem: OSError = OSError(f"the name {address[0]} does not resolve")
    for info in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        try:
            connection = socket_for(info)
            try:
                connection.settimeout(timeout)
                connection.connect(info[4])
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            problem = error
        else:
            return connection
    raise problem


def socket_for(info: Any) -> socket.socket:
    """Return a socket for an entry of `getaddrinfo`, as aiohttp's `socket_factory` does. Raises Forbidden."""
    family, kind, protocol, _, target = info
    if is_confined() and not may_fetch_from(str(target[0]), os.environ[FETCH_FROM]):
        raise Forbidden(f"{target[0]} is not an address on the internet, and a job from the network must not name it")
    return socket.socket(family, kind, protocol)


async def http_session(**options: Any) -> Any:
    """Return a session of aiohttp whose connections are checked; fsspec calls this for its HTTP file system."""
    import aiohttp

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=socket_for), **options)
