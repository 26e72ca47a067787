"""Finds out whether anybody uses this device, by its terminals, its desktop, and the load of other programs.

It opens no keyboard and no mouse: the desktop reports to logind when it is idle or locked.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import psutil

Seconds = tuple[float, float, float]

_REST_SECONDS = 4.0  # between two looks at what takes some time to find out
_SECONDS = 3.0  # for loginctl
# A terminal that was used longer ago than this, or will be, tells more about a clock that was set than about people.
_LONGEST, _EARLIEST = 365 * 86400.0, -10.0


class Usage:
    """Observes, from its creation on, when this device was last used, and how much other programs compute."""

    def __init__(self, root: Path = Path("/")) -> None:
        """Begin to observe; until there is other evidence, the device counts as last used now."""
        self._dev = root / "dev"
        self._began = time.monotonic()
        self._load: Seconds | None = None
        self._share: float | None = None
        self._asked, self._desktops = -_REST_SECONDS, list[float]()

    def idle_seconds(self) -> float:
        """Return for how many seconds no terminal and no desktop has been used."""
        now = time.monotonic()
        if now - self._asked >= _REST_SECONDS:
            self._asked, self._desktops = now, desktops_idle(_sessions(), _monotonic())
        return min(now - self._began, *terminals_idle(self._dev, time.time()), *self._desktops, math.inf)

    def others_load(self) -> float | None:
        """Return the share of the machine's cores that other programs have used of late; None at first."""
        before, now = self._load, time.monotonic()
        if before is None or now - before[0] >= _REST_SECONDS:
            times = psutil.cpu_times()
            busy = sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
            self._load = now, busy, own_seconds()
            if before is not None:
                self._share = share_of_others(before, self._load, os.cpu_count() or 1)
        return self._share


def share_of_others(before: Seconds, after: Seconds, cores: int) -> float:
    """Return the share of the cores that others used between two moments.

    Each moment is the time, the busy time of all cores, and the part of that which was this program's own.
    """
    wall, busy, own = (new - old for new, old in zip(after, before, strict=True))
    return min(1.0, max(0.0, (busy - max(0.0, own)) / wall / cores))


def terminals_idle(dev: Path, now: float) -> list[float]:
    """Return for how many seconds nothing was typed in each terminal. The kernel keeps that to about 8 s."""
    found = []
    for path in (*dev.glob("tty[0-9]*"), *(dev / "pts").glob("[0-9]*")):
        try:
            found.append(now - path.stat().st_atime)
        except OSError:
            continue  # it was closed meanwhile
    return [max(0.0, idle) for idle in found if _EARLIEST < idle < _LONGEST]


def desktops_idle(sessions: Iterable[Mapping[str, str]], now: float) -> list[float]:
    """Return for how many seconds each desktop has not been used: 0 unless it says that it is idle, or is locked.

    `now` is the time in seconds since the machine was started.
    """
    found = []
    for session in sessions:
        graphical = session.get("Type") in ("x11", "wayland", "mir")
        if not graphical or session.get("Class") != "user" or session.get("State") not in ("active", "online"):
            continue
        if session.get("IdleHint") == "yes" or session.get("LockedHint") == "yes":
            since = session.get("IdleSinceHintMonotonic", "0")
            found.append(max(0.0, now - int(since) * 1e-6) if since.isdigit() else 0.0)
        else:
            found.append(0.0)
    return found


def _sessions() -> list[dict[str, str]]:
    """Return what logind knows of the sessions on this device, or nothing where there is no logind."""
    names = [line.split()[0] for line in _loginctl("list-sessions", "--no-legend") if line.split()]
    if not names:
        return []
    wanted = ("Type", "Class", "State", "IdleHint", "IdleSinceHintMonotonic", "LockedHint")
    lines = _loginctl("show-session", *names, *(f"--property={name}" for name in wanted))
    sessions: list[dict[str, str]] = [{}]
    for line in lines:
        if line.strip():
            name, _, value = line.partition("=")
            sessions[-1][name] = value.strip()
        else:
            sessions.append({})
    return sessions


def _loginctl(*arguments: str) -> list[str]:
    program = shutil.which("loginctl")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def is_other_rank(pid: int) -> bool:
    """Return whether this number is that of another rank's process here; in another container it is somebody else's."""
    try:
        return pid != os.getpid() and any("horizonml" in word for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def own_seconds(siblings: Collection[int] = ()) -> float:
    """Return the processor time of this process, of all that it has started, and of what has ended among them.

    That of `siblings` counts, too: processes of other ranks.
    """
    ours: dict[int, psutil.Process] = {}
    for pid in (os.getpid(), *filter(is_other_rank, siblings)):
        try:
            root = psutil.Process(pid)
            ours |= {one.pid: one for one in (root, *root.children(recursive=True))}
        except psutil.Error:
            continue  # it has ended, or is another user's
    seconds = 0.0
    for process in ours.values():
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it has ended
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def _monotonic() -> float:
    """Return the time by the clock of logind."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)
