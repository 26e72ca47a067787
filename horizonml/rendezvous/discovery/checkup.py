"""Looks for what keeps a device from meeting the others: the part of `horizonml doctor` about networks."""

from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import psutil

from horizonml.errors import SecurityError
from horizonml.machine.checkup import Finding, Level, Patient
from horizonml.machine.host import text
from horizonml.machine.network import AddressProbe, listen, route_to
from horizonml.rendezvous.client import Client, ServiceError
from horizonml.rendezvous.device_messages import LinkRates
from horizonml.rendezvous.devices import measure_link
from horizonml.rendezvous.discovery.diagnosis import diagnose_peer, explain_clocks
from horizonml.rendezvous.discovery.multicast import choose, interfaces
from horizonml.rendezvous.discovery.multicast import listen as hear
from horizonml.rendezvous.discovery.records import PORT, STANDBY_PORT
from horizonml.security.tls import client_context
from horizonml.security.token import find_token, token_file
from horizonml.text import human_seconds, some

_ANYWHERE = "198.51.100.1"  # an address for documentation, to which nothing is sent (RFC 5737)
_EAR_SECONDS = 1.5
_ANSWER_SECONDS = 10.0
_PROBE_SECONDS = 1.5  # in which a port answers, be it that nobody listens
_LEAST_MTU = 1400  # bytes; less shows a tunnel
_SLOW_LINK, _SLOW_CARD = 20e6, 100  # bits per second that were measured, Mbit/s of a network card
_FAR_SECONDS = 0.02
_WEAK_SIGNAL = -72.0  # dBm
_IP_MTU = 14  # the option by which Linux tells the packet size of a way; see ip(7)


def interface(patient: Patient, host: str = _ANYWHERE) -> Iterator[Finding]:
    """Look at the interface by which this device reaches another one, or the rest of the world."""
    found = interfaces()
    useful = choose(found)
    if not useful:
        yield Finding(
            "network", Level.PROBLEM, "no network interface is up and has an address, except the loopback interface",
            "this device reaches no other one", "connect it by cable or Wi-Fi; `ip address` shows its interfaces",
        )  # fmt: skip
        return
    try:
        name = route_to(host, PORT)[1]
    except OSError:
        name = useful[0].name  # a network without a way out
    others = [one for one in useful if one.name != name]
    card, folder = psutil.net_if_stats()[name], patient.root / "sys/class/net" / name
    wireless = (folder / "wireless").exists() or (folder / "phy80211").exists()
    words = "Wi-Fi" if wireless else f"{card.speed} Mbit/s" if card.speed else "of unknown speed"
    more = f"; also up: {some([str(one) for one in others])}" if others else ""
    use = "the way to the other devices" if host == _ANYWHERE else f"the way to {host}"
    yield Finding("network", Level.OK, f"{use} leads over {name} ({words}){more}")
    if all(one.virtual for one in useful):
        yield Finding(
            "network", Level.WARNING, f"only {some([one.name for one in useful])} is up",
            "nothing but containers of this device is on it", "connect this device to the network of the others",
        )  # fmt: skip
    yield from _card(patient, name, card, wireless)
    if wireless and (cables := [one.name for one in others if not one.virtual]):
        yield Finding(
            "network", Level.NOTE, f"training goes over Wi-Fi, although {some(cables)} is up, too",
            "a cable is usually faster, and always steadier",
            f"GLOO_SOCKET_IFNAME={cables[0]}, if the other devices are on that network, too",
        )  # fmt: skip


def _card(patient: Patient, name: str, card: Any, wireless: bool) -> Iterator[Finding]:
    """Look at a network card, as `psutil.net_if_stats` describes it."""
    if not wireless and 0 < card.speed <= _SLOW_CARD:
        yield Finding(
            "network", Level.NOTE, f"{name} is connected at {card.speed} Mbit/s",
            "gradients of large models take long on that", "look at the cable (Cat 5e or better) and at the switch",
        )  # fmt: skip
    if card.duplex == psutil.NIC_DUPLEX_HALF:
        yield Finding(
            "network", Level.WARNING, f"{name} works in half duplex", "it cannot send and receive at the same time",
            f"another cable or port; sudo ethtool -s {name} autoneg on",
        )  # fmt: skip
    if card.mtu < _LEAST_MTU:
        yield Finding(
            "network", Level.NOTE, f"{name} takes packets of up to {card.mtu} bytes only",
            "that is usual for tunnels (VPN) and costs some speed elsewhere",
            f"sudo ip link set {name} mtu 1500, if it is no tunnel",
        )  # fmt: skip
    signal = re.search(rf"^\s*{re.escape(name)}:\s+\S+\s+\S+\s+(-?\d+)", patient.read("proc/net/wireless"), re.M)
    if signal is not None and float(signal[1]) < _WEAK_SIGNAL:
        yield Finding(
            "network", Level.WARNING, f"the Wi-Fi signal is weak ({signal[1]} dBm)",
            "messages get lost and are sent again, and all others wait for them",
            "move the device or the access point, or use a cable",
        )  # fmt: skip


def ports(patient: Patient) -> Iterator[Finding]:
    """Look whether the ports are free at which others reach this device."""
    for port, use in ((PORT, "the rendezvous service"), (PORT + 1, "ranks"), (STANDBY_PORT, "the service in reserve")):
        try:
            listen("0.0.0.0", port).close()  # noqa: S104  (for a moment, to see whether it is free)
        except Exception as error:  # noqa: BLE001
            taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            who = _owner(port)
            level = Level.NOTE if who is not None and "horizonml" in who else Level.WARNING
            yield Finding(
                "ports", level, f"port {port} is taken{f' by {who}' if who else ''}" if taken else str(error),
                f"{use} listens there, and only this port is let in by many firewalls",
                f"sudo ss -tlnp 'sport = :{port}'   # shows who; end that, or choose another port (up --port)",
            )  # fmt: skip


def _owner(port: int) -> str | None:
    """Return the command of the process that listens at a port, as far as this user may see it."""
    with suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid:
                return " ".join(psutil.Process(one.pid).cmdline()[:4])
    return None


_OPEN = (
    ("ufw is active", "sudo ufw allow 5353/udp && sudo ufw allow 29400:29402/tcp"),
    (
        "firewalld is running",
        "sudo firewall-cmd --permanent --add-service=mdns --add-port=29400-29402/tcp && sudo firewall-cmd --reload",
    ),
)


def firewall(patient: Patient) -> Iterator[Finding]:
    """Look for a firewall that is active.

    The rules of iptables and nftables are not read: only an administrator may, and devices join as users.
    """
    ufw = re.search(r"^ENABLED=yes\b", patient.read("etc/ufw/ufw.conf"), re.M | re.I) is not None
    firewalld = any(process.info["name"] == "firewalld" for process in psutil.process_iter(["name"]))
    for found, (what, fix) in zip((ufw, firewalld), _OPEN, strict=True):
        if found:
            yield Finding("firewall", Level.NOTE, what, "it may keep the other devices out", fix)


def container(patient: Patient) -> Iterator[Finding]:
    """Look for a container that has a network of its own: one end of a cable whose other end is outside."""
    if not any((patient.root / name).exists() for name in (".dockerenv", "run/.containerenv")):
        return
    links = [patient.root / "sys/class/net" / one.name for one in choose(interfaces())]
    if all(text(link / "iflink") != text(link / "ifindex") for link in links):
        yield Finding(
            "network", Level.WARNING, "this is a container with a network of its own",
            "multicast does not leave it, and others do not reach it", "start it with `--network host`",
        )  # fmt: skip


def multicast(patient: Patient) -> Iterator[Finding]:
    """Listen for other devices, and whether this one hears itself."""
    heard = hear(choose(interfaces()), _EAR_SECONDS)
    for one in heard:
        name = one.interface.name
        if not one.interface.multicast:
            yield Finding(
                "multicast", Level.WARNING, f"multicast is switched off on {name}", "devices find each other by it",
                f"sudo ip link set {name} multicast on",
            )  # fmt: skip
        elif not one.works:
            yield Finding(
                "multicast", Level.WARNING,
                f"multicast seems blocked on {name}: a packet to UDP port 5353 did not come back ({one.problem})",
                "devices find each other by it, and a firewall of this device is the usual reason",
                "sudo iptables -S; sudo nft list ruleset   # shows its rules",
            )  # fmt: skip
    others = sorted({address for one in heard for address in one.others})
    if others:
        yield Finding("multicast", Level.OK, f"multicast works; other devices were heard ({some(others)})")
    elif any(one.works for one in heard):
        yield Finding(
            "multicast", Level.NOTE, "this device hears itself by multicast, and no other device",
            "a guest Wi-Fi, or a switch, may keep devices apart (client isolation, IGMP snooping)",
            "horizonml join --peer HOST   # does without multicast",
        )  # fmt: skip


def explain_silence() -> list[str]:
    """Return what may be the reason why this device hears of no service, one sentence on each line."""
    patient = Patient()
    found = [one for check in (interface, container, multicast, firewall) for one in check(patient)]
    return [str(one) for one in found if one.level is not Level.OK] + [
        "check that `horizonml up JOB` runs on one device of the same network, and that its firewall lets in UDP port "
        "5353 and TCP ports 29400 to 29402"
    ]


def secret(patient: Patient) -> Iterator[Finding]:
    """Look at the token."""
    try:
        token = find_token(patient.env)
    except SecurityError as error:
        yield Finding("token", Level.PROBLEM, str(error), "no device lets this one in")
        return
    if token is None:
        yield Finding(
            "token", Level.NOTE, "this device has no token", "`horizonml join` needs that of the device that runs `up`",
            f"copy {token_file(patient.env)} from there, or make one here: horizonml token",
        )  # fmt: skip
    else:
        yield Finding("token", Level.OK, f"token {token.id}")


def time_of_day(patient: Patient, ahead: float | None = None) -> Iterator[Finding]:
    """Look whether the clock has been set; that of another device is so many seconds `ahead`."""
    wrong = explain_clocks(ahead)
    if wrong is not None:
        yield Finding("clock", Level.WARNING, wrong.rstrip("."))


def peer(patient: Patient, host: str, port: int) -> Iterator[Finding]:
    """Look at the way to another device, and at the service there."""
    there = f"{host}:{port}"
    try:
        token = find_token(patient.env)
    except SecurityError:
        token = None
    problem = diagnose_peer(host, port, token)
    if problem is not None:
        yield Finding("peer", Level.PROBLEM, problem.rstrip("."), "this device cannot join there")
        return
    with closing(Client((host, port), client_context(token) if token is not None else None)) as client:
        yield Finding("peer", Level.OK, f"{there} runs HorizonML {client.version}, and lets this device in")
        yield from time_of_day(patient, client.clock_ahead)
        yield _link(client, there)
    yield from _way(host, port)


def _link(client: Client, there: str) -> Finding:
    """Measure the way to the service."""
    begin = time.perf_counter()
    try:
        rates: LinkRates = measure_link(lambda request: client.ask(request, _ANSWER_SECONDS))
    except (ServiceError, ValueError):  # a service without `horizonml up` echoes nothing
        return Finding("link", Level.OK, f"{there} answers within {human_seconds(time.perf_counter() - begin)}")
    what = f"{rates} to {there} and back, {human_seconds(rates.seconds)} for a short message"
    slow, far = 8 * min(rates.sent, rates.received) < _SLOW_LINK, rates.seconds > _FAR_SECONDS
    if not slow and not far:
        return Finding("link", Level.OK, what)
    return Finding(
        "link", Level.NOTE, what, "exact data parallelism is slow on such a link",
        "parallel.exact: false lets the planner choose local steps and fewer bits (docs/slow-links.md)",
    )  # fmt: skip


def _way(host: str, port: int) -> Iterator[Finding]:
    """Look whether the other ports are let through, and how large packets may be."""
    with suppress(OSError), socket.create_connection((host, port), _ANSWER_SECONDS) as way:
        address, name = way.getpeername()[0], route_to(host, port)[1]
        until = time.monotonic() + _PROBE_SECONDS
        with closing(AddressProbe([(address, port + 1), (address, port + 2)])) as probe:
            while probe.silent and time.monotonic() < until:
                probe.look()
                time.sleep(0.02)
        if probe.silent:
            silent = some([str(one) for _, one in sorted(probe.silent)])
            yield Finding(
                "peer", Level.WARNING, f"{host} answers on port {port}, and not on {silent}",
                "ranks send their data there", f"sudo ufw allow {port}:{port + 2}/tcp   # on {host}",
            )  # fmt: skip
        own = psutil.net_if_stats()[name].mtu
        with suppress(OSError):
            size = way.getsockopt(socket.IPPROTO_IP, _IP_MTU) if way.family == socket.AF_INET else None
            if size is not None and size < own:
                yield Finding(
                    "network", Level.NOTE, f"packets to {host} may have {size} bytes, and on {name} {own}",
                    "a tunnel is on the way, which costs some speed",
                )  # fmt: skip


NETWORK_CHECKS = (secret, interface, container, ports, firewall, multicast, time_of_day)
