"""Says in sentences why a device finds no other that it could train with, and what to do about it.

It also finds out whether a firewall on this machine keeps devices from finding or reaching each other.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from horizonml.rendezvous.discovery.multicast import Hearing, Interface, choose, interfaces, listen
from horizonml.rendezvous.discovery.records import Found
from horizonml.text import some

_SECONDS = 3.0  # for a program that lists rules
_PORTS = (5353, 29400, 29401)
_EVERYTHING = re.compile(
    r"(counter (packets \d+ bytes \d+ )?)?(drop|reject)\b"
)  # a rule of nftables without conditions
_MDNS = re.compile(r"\b(5353|mdns|zeroconf)\b")


@dataclass(frozen=True)
class Firewall:
    """A firewall that is active on this machine: what it does, and the commands that open what is needed."""

    says: str  # a clause, such as "ufw is active"
    remedy: str


def find_firewalls(root: Path = Path("/")) -> list[Firewall]:
    """Return the firewalls that seem to be in the way, as far as this user can see them."""
    found = []
    if _ufw_is_on(root / "etc/ufw/ufw.conf"):
        found.append(
            Firewall("ufw is active", "`sudo ufw allow 5353/udp && sudo ufw allow 29400:29401/tcp`"),
        )
    if any(name == "firewalld" for name in _processes()):
        allow = "sudo firewall-cmd --permanent --add-service=mdns --add-port=29400-29401/tcp"
        found.append(Firewall("firewalld is running", f"`{allow} && sudo firewall-cmd --reload`"))
    if not found:
        rule = in_iptables(_lines("iptables", "-S"))
        if rule is not None:
            insert = f"sudo iptables -I {rule.split()[1]}"
            allow = f"{insert} -p udp --dport 5353 -j ACCEPT && {insert} -p tcp --dport 29400:29401 -j ACCEPT"
            found.append(Firewall(f"iptables has the rule `{rule}`", f"`{allow}`"))
    if not found:
        rule = in_nftables(_lines("nft", "list", "ruleset"))
        if rule is not None:
            found.append(
                Firewall(f"nftables has `{rule}`", "accept `udp dport 5353` and `tcp dport 29400-29401` there")
            )
    return found


def can_be_read() -> bool:
    """Return whether this user would see the rules of a firewall."""
    return os.geteuid() == 0 and any(shutil.which(program) for program in ("iptables", "nft"))


def in_iptables(lines: Iterable[str]) -> str | None:
    """Return the first rule of `iptables -S` that drops mDNS or a port of HorizonML, or None."""
    dropped = None
    for line in lines:
        words = line.split()
        if words[:1] == ["-P"] and words[1:] in (["INPUT", "DROP"], ["OUTPUT", "DROP"]):
            dropped = dropped or line
        if words[:1] != ["-A"] or words[1:2] not in (["INPUT"], ["OUTPUT"]) or "-j" not in words:
            continue
        target = words[words.index("-j") + 1 :][:1]
        if target == ["ACCEPT"] and _MDNS.search(line):
            return None
        ours = _ours(" ".join(re.findall(r"--[ds]ports? (\S+)", line)))
        everything = not any(option in words for option in ("-p", "-s", "-d", "-i", "-o", "-m"))
        if target in (["DROP"], ["REJECT"]) and (ours or everything):
            dropped = dropped or line
    return dropped


def in_nftables(lines: Iterable[str]) -> str | None:
    """Return what in `nft list ruleset` drops mDNS or a port of HorizonML, or None."""
    dropped, hooked = None, False
    for line in map(str.strip, lines):
        if line.startswith("chain "):
            hooked = False
        if re.search(r"\bhook (input|output)\b", line):
            hooked = True
            if "policy drop" in line:
                dropped = dropped or line
        elif hooked and _MDNS.search(line) and "accept" in line:
            return None
        elif hooked and re.search(r"\b(drop|reject)\b", line):
            ours = _ours(" ".join(re.findall(r"port (\{[^}]*\}|\S+)", line)))
            dropped = dropped or (line if ours or _EVERYTHING.match(line) else None)
    return dropped


def _ours(ports: str) -> bool:
    """Return whether a list of ports has one of ours, also within a range such as 29000:30000 or 29000-30000."""
    if _MDNS.search(ports):
        return True
    ranges = [(int(low), int(high or low)) for low, high in re.findall(r"\b(\d{1,5})(?:[:-](\d{1,5}))?\b", ports)]
    return any(low <= port <= high for low, high in ranges for port in _PORTS)


def _ufw_is_on(path: Path) -> bool:
    try:
        return re.search(r"^ENABLED=yes\b", path.read_text(), re.M | re.I) is not None
    except OSError:
        return False


def _processes() -> list[str]:
    return [process.info["name"] or "" for process in psutil.process_iter(["name"])]


def _lines(*command: str) -> list[str]:
    """Return what a program prints, or nothing where there is none, or it may not."""
    program = shutil.which(command[0]) or shutil.which(command[0], path="/usr/sbin:/sbin")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()


CLOCKS_DIFFER = 60.0  # seconds
_OLDEST = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).timestamp()  # before this, a clock has not been set
_CONTAINER = (".dockerenv", "run/.containerenv")
_MOST_NAMED = 5


@dataclass(frozen=True)
class Surroundings:
    """What a device sees of its network: where it has looked, what it has heard, and what is in the way."""

    heard: tuple[Hearing, ...]  # of each interface that was tried
    left_out: tuple[Interface, ...] = ()
    firewalls: tuple[Firewall, ...] = ()
    rules_are_known: bool = True  # whether this user would see the rules of a firewall
    in_container: bool = False  # with a network of its own
    clock: float = 2e9  # of this device, in seconds since 1970


def look_around(seconds: float = 1.5) -> Surroundings:
    """Return what this device sees of its network, after listening for some seconds."""
    found = interfaces()
    tried = choose(found)
    return Surroundings(
        heard=tuple(listen(tried, seconds)),
        left_out=tuple(interface for interface in found if interface not in tried),
        firewalls=tuple(find_firewalls()),
        rules_are_known=can_be_read(),
        in_container=_in_container(tried),
        clock=time.time(),
    )


def _in_container(tried: Sequence[Interface], root: Path = Path("/")) -> bool:
    """Return whether this is a container that has a network of its own: one end of a cable whose other end is outside.

    A container in the network of its machine has the machine's interfaces, which are no such ends.
    """
    if not any((root / file).exists() for file in _CONTAINER):
        return False
    links = [root / "sys/class/net" / interface.name for interface in tried]
    return all(_number(link / "iflink") != _number(link / "ifindex") for link in links)


def _number(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def explain_nobody(
    found: Sequence[Found],
    token_id: str,
    version: str,
    job: str | None = None,
    surroundings: Surroundings | None = None,
    clock_ahead: float | None = None,
) -> str:
    """Return why this device has found no service that it can join, in sentences, one on each line.

    `found` are those that a browse has found all the same. `token_id` and `version` are this device's, the former empty
    without a token, and `job` is the job that it wants, if not any. `clock_ahead` says by how many seconds a service's
    clock is ahead of this one, where that is known. Unless `surroundings` are given, it looks around first, which takes
    2 s.
    """
    lines = [_why_not(service, token_id, version, job) for service in found[:_MOST_NAMED]]
    if len(found) > _MOST_NAMED:
        lines.append(f"There are {len(found) - _MOST_NAMED} more services that this device cannot join.")
    if not found:
        lines += _silence(look_around() if surroundings is None else surroundings)
    clocks = explain_clocks(clock_ahead, None if surroundings is None else surroundings.clock)
    return "\n".join([*lines, *([clocks] if clocks is not None else [])])


def _why_not(service: Found, token_id: str, version: str, job: str | None) -> str:
    """Return why this device cannot join a service."""
    place = f"{service.name} at {service.host}:{service.port}"
    if service.token_id != token_id:
        if not token_id:
            return (
                f"{place} has a token ({service.token_id}), and this device has none: copy the file "
                "~/.config/horizonml/token from there, or set $HORIZONML_TOKEN."
            )
        if not service.token_id:
            return f"{place} has no token, and this device has one ({token_id}): run `horizonml token` there."
        return (
            f"{place} has another token ({service.token_id}) than this device ({token_id}): if it is yours, copy its "
            "file ~/.config/horizonml/token to this device."
        )
    if service.version != version:
        return (
            f"{place} runs HorizonML {service.version or 'of an unknown version'}, and this device {version}: install "
            "the same version on both."
        )
    if job is not None and service.job != job:
        return f"{place} trains the job {service.job!r}, and this device was told to join {job!r}."
    return (
        f"{place} has this device's token and version but did not let it join: a firewall there may close port "
        f"{service.port}, or what announced it has ended."
    )


def _silence(seen: Surroundings) -> list[str]:
    """Return why nothing at all was found."""
    if not seen.heard:
        return [
            "No network interface of this device is up and has an address, except the loopback interface.",
            "Connect it to the network of the other devices by cable or Wi-Fi.",
            *(_NO_HOST_NETWORK if seen.in_container else ()),
        ]
    names = ", ".join(str(hearing.interface) for hearing in seen.heard)
    lines = [f"No device announces itself on {names}."]
    virtual = [hearing.interface.name for hearing in seen.heard if hearing.interface.virtual]
    if len(virtual) == len(seen.heard):
        lines.append(
            f"Only {some(virtual)} {'is' if len(virtual) == 1 else 'are'} up, which containers of this device alone "
            "are on: connect the device to the network of the others."
        )
    if seen.left_out:
        left = some([interface.name for interface in seen.left_out])
        lines.append(f"Containers' networks were left out ({left}).")
    if seen.in_container:
        lines += _NO_HOST_NETWORK
    lines += [_deaf(hearing, seen) for hearing in seen.heard if not hearing.works or not hearing.interface.multicast]
    lines += _others(seen)
    for firewall in seen.firewalls:
        lines.append(f"On this device {firewall.says}; let in what is needed: {firewall.remedy}.")
    if not seen.firewalls and not seen.rules_are_known:
        lines.append(
            "Whether a firewall of this device is in the way, only its administrator can see: run `sudo iptables -S` "
            "or `sudo nft list ruleset`."
        )
    lines.append(
        "Check that `horizonml up JOB` runs on one device of the same network, and that its firewall lets in UDP port "
        "5353 and TCP ports 29400 and 29401."
    )
    lines.append("If the network does not pass multicast, name that device: `horizonml join --peer HOST`.")
    return lines


_NO_HOST_NETWORK = (
    "This is a container with a network of its own, which multicast does not leave: start it with `--network host`.",
)


def _deaf(hearing: Hearing, seen: Surroundings) -> str:
    """Return what a device that does not hear itself on an interface can conclude from that."""
    interface, reason = hearing.interface, hearing.problem
    if not interface.multicast:
        return (
            f"Multicast is switched off on {interface.name}: `sudo ip link set {interface.name} multicast on` switches "
            "it on."
        )
    likely = "" if seen.firewalls else ", most likely by a firewall on this device"
    return (
        f"Multicast seems blocked on {interface.name}{likely}: a packet to UDP port 5353 did not come back to this "
        f"device itself ({reason})."
    )


def _others(seen: Surroundings) -> list[str]:
    """Return what follows from having heard others, or not."""
    heard = list(dict.fromkeys(address for hearing in seen.heard for address in hearing.others))
    if heard:
        return [f"Multicast works, since other devices were heard ({some(heard)}); none of them announces a job."]
    if any(hearing.works for hearing in seen.heard):
        return [
            "No other device of any kind was heard, although this device hears itself: its network may keep devices "
            "apart, as a guest Wi-Fi or a switch does that blocks multicast (client isolation, IGMP snooping)."
        ]
    return []


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
        wrong = f"The service's clock is {_duration(abs(ahead))} {direction} this device's"
    else:
        return None
    return (
        f"{wrong}: that keeps nobody from joining, but the times in a run's records will be wrong; "
        "`sudo timedatectl set-ntp true` sets a clock."
    )


def _duration(seconds: float) -> str:
    """Return a long time in words."""
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} seconds"
