"""Finds out whether a firewall on this machine keeps devices from finding or reaching each other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

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
