"""Determines which cores and how much memory this process may use within the limits of its container.

The memory that training frees is kept, because the next step needs the same amount again. glibc returns large blocks to
the kernel when they are freed, and every step then pays for thousands of page faults to get them again. Keeping them
makes ResNet-18 steps about a tenth faster on one core; the process stays at the peak size that it reaches anyway. See
mallopt(3). The kernel's counts of processes that it has ended because memory ran out are read here, too.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import time
from collections.abc import Collection
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil

from horizonml.errors import TooManyFiles

_CPU_PROCESS, _CUDA_PROCESS = 150 << 20, 300 << 20  # as measured for ranks of tiny models, by the build of PyTorch


def available_cores(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the cores that this process may use: its CPU affinity, limited by its quota (cgroup v2 or v1)."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota, period = _words(root / "cpu.max", 2) or (None, None)
    if quota is None:
        quota = (_words(root / "cpu/cpu.cfs_quota_us", 1) or (None,))[0]
        period = (_words(root / "cpu/cpu.cfs_period_us", 1) or (None,))[0]
    if quota is not None and period is not None and quota.isdigit() and int(period) > 0:
        cores = min(cores, int(quota) / int(period))
    return cores


def raise_descriptor_limit(needed: int = 0) -> None:
    """Let this process open as many files and connections as the system lets it ask for.

    Raises TooManyFiles if that is less than `needed`: gloo ends a process that can open no connection, without a word.
    """
    import resource  # not on every system

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # a system may forbid what it announces
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise TooManyFiles(f"{soft} open files and connections are allowed here, and this rank needs about {needed}")


def memory_limit(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the bytes that this process may use: the container's limit (cgroup v2 or v1), or the machine's memory."""
    total = float(psutil.virtual_memory().total)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = (_words(root / name, 1) or ("max",))[0]
        if limit.isdigit():
            return min(total, float(limit))
    return total


def memory_used(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the bytes that count against the container's limit, including its file cache; None without a cgroup."""
    for name in ("memory.current", "memory/memory.usage_in_bytes"):
        used = _words(root / name, 1)
        if used is not None:
            return float(used[0])
    return None


def memory_left(root: Path = Path("/sys/fs/cgroup"), processes: int = 1) -> float:
    """Return the bytes that are left for each of several processes like this one, of which this is one.

    They share what is left on the machine, or below the container's limit, but not what each one's own limits leave.
    """
    machine, limit, used = psutil.virtual_memory(), memory_limit(root), memory_used(root)
    left = float(machine.available)
    if limit < machine.total and used is not None:  # without a limit, what is used includes all files in the cache
        left = min(left, limit - used)
    return max(0.0, min([left / processes, *(allowed - taken for allowed, taken in _process_limits())]))


def memory_share(processes: int) -> float:
    """Return the bytes that each of several such processes on this machine, or in this container, may use.

    Limits of the process itself (RLIMIT_DATA and RLIMIT_AS, see getrlimit(2)) are not shared with others.
    """
    return min([memory_limit() / processes, *(allowed for allowed, _ in _process_limits())])


def _process_limits() -> list[tuple[float, float]]:
    """Return the limits on this process's own memory that are set, each with what it takes of it, in bytes."""
    found = []
    for name, key in (("RLIMIT_DATA", "data"), ("RLIMIT_AS", "vms")):
        limit = getattr(psutil, name, None)
        if limit is None:  # not Linux
            continue
        allowed = psutil.Process().rlimit(limit)[0]
        if allowed != psutil.RLIM_INFINITY:
            found.append((float(allowed), float(getattr(psutil.Process().memory_info(), key))))
    return found


def process_memory() -> int:
    """Return the bytes of its own that a process takes at least once it has loaded PyTorch."""
    found = find_spec("torch")
    libraries = Path(found.origin).parent / "lib" if found is not None and found.origin is not None else Path()
    return _CUDA_PROCESS if (libraries / "libtorch_cuda.so").exists() else _CPU_PROCESS


def throttled_seconds(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the seconds for which the container's CPU quota has throttled it so far; None without a cgroup."""
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


ProcessorSeconds = tuple[float, float, float]
"""A moment: its time, the busy time of all cores since the start, and the part of it that was this program's own."""


def processor_seconds(siblings: Collection[int] = ()) -> ProcessorSeconds:
    """Return the present moment; the processor time of the processes `siblings` of other ranks counts as one's own."""
    return time.monotonic(), _busy_seconds(), own_seconds(siblings)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal")))


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


def share_of_others(before: ProcessorSeconds, after: ProcessorSeconds, cores: int) -> float:
    """Return the share of the cores that others used between two moments."""
    wall, busy, own = (new - old for new, old in zip(after, before, strict=True))
    return min(1.0, max(0.0, (busy - max(0.0, own)) / wall / cores))


class OtherWork:
    """Measures how much of the machine other processes use, from the moment at which it is created."""

    def __init__(self) -> None:
        self._start = self._now()

    def cores_taken(self) -> float:
        """Return how many of the cores that this process may use were used by others, on average since the start.

        The others are all processes except this one and those of its children that have ended. They are assumed to use
        the cores that this process may not use before any of its own.
        """
        now = self._now()
        if now[0] <= self._start[0]:
            return 0.0
        cores, machine = available_cores(), os.cpu_count() or 1
        return min(cores, max(0.0, share_of_others(self._start, now, machine) * machine - (machine - cores)))

    @staticmethod
    def _now() -> ProcessorSeconds:
        own = os.times()
        return time.monotonic(), _busy_seconds(), own.user + own.system + own.children_user + own.children_system


def threads_per_rank(cores: float, ranks_here: int) -> int:
    """Return the threads for each rank on a machine, where contended threads are several times slower than one."""
    return max(1, math.floor(cores / ranks_here))


def _words(path: Path, count: int) -> tuple[str, ...] | None:
    try:
        words = path.read_text().split()
    except OSError:
        return None
    return tuple(words[:count]) if len(words) >= count else None


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Keep freed memory in this process, and return whether that is possible, which it is only with glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30) and libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))


# In cgroup v2 and v1: processes that were killed in this container, under its limit or the machine's.
_CONTAINER = ("memory.events", "memory/memory.oom_control")


def killed_in_container(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how many processes of this container the kernel has ended for their memory; None if unknown.

    The count belongs to the container: one that is started anew, as by Kubernetes, counts from 0 again.
    """
    for name in _CONTAINER:
        found = _count(root / name)
        if found is not None:
            return found
    return None


def killed_on_machine(path: Path = Path("/proc/vmstat")) -> int | None:
    """Return how many processes the kernel has ended for their memory since this machine was started; None if unknown.

    Containers see this count, too: it is the machine's, and includes what was killed for the limit of a container.
    """
    return _count(path)


def _count(path: Path) -> int | None:
    """Return the value of the line `oom_kill` in a file of names and values."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return None
