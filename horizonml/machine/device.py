"""What this process may use of its machine: cores and memory, the container's limits included."""

from __future__ import annotations

import functools
import math
import os
import platform
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from horizonml import __version__


def available_cores(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores this process may use: its CPU affinity, cut by the container's quota (cgroup v2 or v1)."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota, period = _words(root / "cpu.max", 2) or (None, None)
    if quota is None:
        quota = (_words(root / "cpu/cpu.cfs_quota_us", 1) or (None,))[0]
        period = (_words(root / "cpu/cpu.cfs_period_us", 1) or (None,))[0]
    if quota is not None and period is not None and quota.isdigit() and int(period) > 0:
        cores = min(cores, int(quota) / int(period))
    return cores


def memory_limit(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes this process may use: the container's limit (cgroup v2 or v1), else the machine's memory."""
    total = float(psutil.virtual_memory().total)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = (_words(root / name, 1) or ("max",))[0]
        if limit.isdigit():
            return min(total, float(limit))
    return total


def memory_used(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Bytes that count against the container's limit (cgroup v2 or v1), file cache included; None without a cgroup."""
    for name in ("memory.current", "memory/memory.usage_in_bytes"):
        used = _words(root / name, 1)
        if used is not None:
            return float(used[0])
    return None


def throttled_seconds(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Seconds for which the container's CPU quota held it up so far (cgroup v2 or v1); None without a cgroup."""
    for name, field, unit in (("cpu.stat", "throttled_usec", 1e-6), ("cpu/cpu.stat", "throttled_time", 1e-9)):
        try:
            lines = (root / name).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == field:
                return float(value) * unit
    return None


class OtherWork:
    """Measures how much of the machine other processes use, from when it is made."""

    def __init__(self) -> None:
        self._start = self._now()

    def cores_taken(self) -> float:
        """Return how many of the cores that this process may use others had, on average since the start.

        Others are neither this process nor its children that have ended. Cores that this process may not use anyway
        are theirs before they take any of its own.
        """
        wall, busy, own = (now - then for now, then in zip(self._now(), self._start, strict=True))
        if wall <= 0:
            return 0.0
        cores = available_cores()
        spare = (os.cpu_count() or 1) - cores
        return min(cores, max(0.0, (busy - own) / wall - spare))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds that passed, that all processors worked, and that they worked for this process."""
        times = psutil.cpu_times()
        busy = sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
        own = os.times()
        return time.monotonic(), busy, own.user + own.system + own.children_user + own.children_system


def threads_per_rank(cores: float, ranks_here: int) -> int:
    """OpenMP threads for each of the ranks on a machine: contended threads are several times slower than one."""
    return max(1, math.floor(cores / ranks_here))


def device_name() -> str:
    """The processor's name, for people and for the cache."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model\t", "Hardware")):
                return f"{line.partition(':')[2].strip()} ({os.cpu_count()} cores)"
    except OSError:
        pass  # not Linux
    return f"{platform.processor() or platform.machine()} ({os.cpu_count()} cores)"


@functools.cache
def machine_id() -> str:
    """Return what tells this machine from every other: its boot id, which all its containers share.

    Elsewhere than on Linux it is the address of the first network card.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{uuid.getnode():012x}"


def shared_machine() -> tuple[str, int]:
    """Return what tells whether two containers run on one machine, and that machine's cores."""
    return machine_id()[:8], os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """What this machine is, for records."""
    return {
        "processor": device_name(),
        "architecture": platform.machine(),
        "system": platform.platform(),
        "memory": psutil.virtual_memory().total,
    }


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what trains here, for records. The revision is that of the source tree, or of the image."""
    import torch  # heavy, and not needed by all who ask about devices

    found = {"horizonml": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    revision = os.environ.get("HORIZONML_REVISION") or _git_revision(Path(__file__).resolve().parents[2])
    return found | ({"revision": revision} if revision else {})


def _git_revision(tree: Path) -> str | None:
    """The commit of a source tree, with a mark if it was changed since; None if it is none."""
    if not (tree / ".git").exists():
        return None
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def _words(path: Path, count: int) -> tuple[str, ...] | None:
    try:
        words = path.read_text().split()
    except OSError:
        return None
    return tuple(words[:count]) if len(words) >= count else None
