"""Limits where the rank of a job that came over the network fetches files from, and what it says about the answers.

Such a job may name servers on the internet and the device that offers the job. Every address is checked when a
connection is made, so neither a name that resolves to a private address nor a redirect leads into the network behind
this device. A rank is confined by an environment variable, which the processes that it starts inherit.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import socket
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

FETCH_FROM = "HORIZONML_FETCH_FROM"  # the private addresses that a confined rank may fetch from, separated by commas
CONFINED_BYTES = 16 << 30  # of everything that jobs from the network have fetched, for each kind of file
SPARE_BYTES = 256 << 20  # of the disk that downloads leave free, however long they go on
_MOST_REDIRECTIONS = 5
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


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


def _unwrapped(address: Address) -> Address:
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
