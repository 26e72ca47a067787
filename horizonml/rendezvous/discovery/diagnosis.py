"""Says in sentences why a device cannot join a service that it has found, or whose address it was told."""

from __future__ import annotations

import datetime
import errno
import ipaddress
import socket
import ssl
import time
from collections.abc import Sequence

from horizonml import __version__
from horizonml.machine.network import route_to
from horizonml.rendezvous.client import Client, ServiceError, ServiceRefuses
from horizonml.rendezvous.discovery.records import FoundService
from horizonml.security.tls import client_context, is_of_a_token
from horizonml.security.token import TOKEN, Token
from horizonml.text import rough_time

CLOCKS_DIFFER = 60.0  # seconds
_OLDEST = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).timestamp()  # before this, a clock has not been set
_MOST_NAMED = 5
_COPY_HERE = f"copy the file ~/.config/horizonml/token from there, or set ${TOKEN}."
_COPY_THERE = "if it is yours, copy its file ~/.config/horizonml/token to this device."
_SAME = "install the same version on both."


def explain_misfits(found: Sequence[FoundService], token_id: str, version: str) -> list[str]:
    """Return why this device can join none of the services that it has found, one sentence on each line.

    `token_id` and `version` are this device's, the former empty without a token.
    """
    lines = [_why_not(service, token_id, version) for service in found[:_MOST_NAMED]]
    if len(found) > _MOST_NAMED:
        lines.append(f"There are {len(found) - _MOST_NAMED} more services that this device cannot join.")
    return lines


def _why_not(service: FoundService, token_id: str, version: str) -> str:
    place = f"{service.name} at {service.host}:{service.port}"
    if service.token_id != token_id:
        if not token_id:
            return f"{place} has a token ({service.token_id}), and this device has none: {_COPY_HERE}"
        if not service.token_id:
            return f"{place} has no token, and this device has one ({token_id}): run `horizonml token` there."
        return f"{place} has another token ({service.token_id}) than this device ({token_id}): {_COPY_THERE}"
    if service.version != version:
        theirs = service.version or "of an unknown version"
        return f"{place} runs HorizonML {theirs}, and this device {version}: {_SAME}"
    return (
        f"{place} has this device's token and version but did not let it join: a firewall there may close port "
        f"{service.port}, or what announced it has ended."
    )


def explain_clocks(ahead: float | None, clock: float | None = None) -> str | None:
    """Return what is wrong with the clocks, which keeps nobody from joining, but spoils what is recorded; or None.

    `ahead` says by how many seconds a service's clock is ahead of this device's, as `Client.clock_ahead` does; `clock`
    is the time of this device, by default now.
    """
    clock = time.time() if clock is None else clock
    if clock < _OLDEST:
        date = datetime.datetime.fromtimestamp(clock, datetime.UTC).date()
        wrong = f"This device's clock has not been set, it says {date}"
    elif ahead is not None and abs(ahead) > CLOCKS_DIFFER:
        direction = "ahead of" if ahead > 0 else "behind"
        wrong = f"The service's clock is {rough_time(abs(ahead))} {direction} this device's"
    else:
        return None
    return (
        f"{wrong}: that keeps nobody from joining, but the times in a run's records will be wrong; "
        "`sudo timedatectl set-ntp true` sets a clock."
    )


_NO_ROUTE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.EINVAL}


def diagnose_peer(
    host: str, port: int, token: Token | None, version: str = __version__, seconds: float = 5.0
) -> str | None:
    """Return why the service at an address cannot be used, as one or two sentences, or None if it can be.

    It tries one thing after the other (the name, the route, the port, the token, the protocol) within some seconds.
    """
    problem = _unreachable(host, port) or _closed(host, port, seconds)
    if problem is not None:
        return problem
    place = f"{host}:{port}"
    try:
        client = Client((host, port), None if token is None else client_context(token), seconds)
    except ServiceError as error:
        if isinstance(error.__cause__, ServiceRefuses):
            return f"{place} refuses this device: {error.__cause__}."
        return _misunderstood(host, port, token, seconds, error) or f"{place} cannot be used: {str(error).rstrip('?')}."
    client.close()
    if client.version != version:
        return f"{place} runs HorizonML {client.version}, and this device runs {version}: {_SAME}"
    return None


def _unreachable(host: str, port: int) -> str | None:
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        if _is_address(host):
            return f"{host} is an address that this device cannot use: it has no network of that kind."
        advice = "give its address instead, which `ip address` or `hostname -I` shows there"
        if host.endswith(".local") or "." not in host:
            return (
                f"The name {host} does not resolve on this device, as names on a local network often do not: {advice}."
            )
        return f"The name {host} does not resolve: check the spelling, or {advice}."
    try:
        route_to(host, port)
    except OSError as error:
        if error.errno in _NO_ROUTE:
            return f"This device has no route to {host}: connect both to one network."
    return None


def _closed(host: str, port: int, seconds: float) -> str | None:
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except TimeoutError:
        return (
            f"{host} does not answer on port {port}: it is off, has another address by now, or a firewall drops what "
            f"is sent there; let in TCP ports {port} to {port + 2} on it."
        )
    except ConnectionRefusedError:
        return (
            f"{host} is there, but nothing listens on port {port}: check that `horizonml up JOB` runs on it, and "
            "on which port."
        )
    except OSError as error:
        if error.errno in _NO_ROUTE:
            return (
                f"Nobody on the network answers for {host} ({_words(error)}): it is off or has another address by now, "
                "or a firewall rejects what is sent there."
            )
        return f"No connection to {host}:{port} can be made: {_words(error)}."
    return None


def _misunderstood(host: str, port: int, token: Token | None, seconds: float, error: ServiceError) -> str | None:
    place = f"{host}:{port}"
    encrypts = _encrypts(host, port, seconds)
    if encrypts is False:
        return f"{place} encrypts, but is not a service of HorizonML: check which port the service has."
    if encrypts and token is None:
        return f"{place} has a token, and this device has none: {_COPY_HERE}"
    if encrypts and token is not None:
        if not isinstance(error.__cause__, ssl.SSLError):
            return None  # it is not for the token
        return f"{place} has another token than this device ({token.id}): {_COPY_THERE}"
    if token is None:
        return None
    try:
        Client((host, port), None, seconds).close()
    except ServiceError:
        return f"{place} is not a service of HorizonML: check which port the service has."
    return (
        f"{place} has no token (--insecure), and this device has one: run `horizonml token` there, and start the "
        "service again."
    )


def _encrypts(host: str, port: int, seconds: float) -> bool | None:
    """Return whether a service shows the certificate of a token, False if it shows another, None if it shows none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent; only who is there is looked at
    try:
        with (
            socket.create_connection((host, port), timeout=seconds) as plain,
            context.wrap_socket(plain) as connection,
        ):
            shown = connection.getpeercert(binary_form=True)
    except OSError:
        return None
    return shown is not None and is_of_a_token(shown)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def _words(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
