"""Describes this host: its identity, its software, and the cores and memory that this process may use.

The memory that training frees is kept, because the next step needs the same amount again. glibc returns large blocks to
the kernel when they are freed, and every step then pays for thousands of page faults to get them again. Keeping them
makes ResNet-18 steps about a tenth faster on one core; the process stays at the peak size that it reaches anyway. See
mallopt(3). The kernel's counts of processes that it has ended because memory ran out are read here, too.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from horizonml import __version__
from horizonml.errors import JobError, TooManyFiles

_CPU_PROCESS, _CUDA_PROCESS = 150 << 20, 300 << 20  # as measured for ranks of tiny models, by the build of PyTorch


EMULATED_CORES = "HORIZONML_EMULATED_CORES"  # of the device that a rank stands for, see `machine.emulation`


def available_cores(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the cores that this process may use: its CPU affinity, limited by its quota (cgroup v2 or v1)."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    limit = text(root / "cpu.max") or " ".join(text(root / f"cpu/cpu.cfs_{kind}_us") for kind in ("quota", "period"))
    quota, _, period = limit.partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        cores = min(cores, int(quota) / int(period))
    return min(cores, float(os.environ.get(EMULATED_CORES) or cores))


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
        limit = text(root / name)
        if limit.isdigit():
            return min(total, float(limit))
    return total


def memory_used(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the bytes that count against the container's limit, including its file cache; None without a cgroup."""
    for name in ("memory.current", "memory/memory.usage_in_bytes"):
        used = text(root / name)
        if used:
            return float(used)
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
        value = _named(root / name, field)
        if value is not None:
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
    return 1 if needs_one_thread() else max(1, math.floor(cores / ranks_here))


@functools.cache
def needs_one_thread() -> bool:
    """Return whether PyTorch must not compute with several threads, which would end in an illegal instruction.

    That is so on Arm processors of 2016 and before (Raspberry Pi 3 and 4, Jetson Nano), with builds for CUDA, as PyPI
    has them for Arm from 2.11 on: these multiply matrices with NVIDIA's library for its own, newer processors.
    """
    if sys.platform != "linux" or platform.machine() != "aarch64":
        return False
    has_atomics = ctypes.CDLL(None).getauxval(_AT_HWCAP) & _HWCAP_ATOMICS
    return not has_atomics and (process_memory() == _CUDA_PROCESS)


_AT_HWCAP, _HWCAP_ATOMICS = 16, 1 << 8  # see getauxval(3), and the kernel's arch/arm64/include/uapi/asm/hwcap.h


def text(path: Path) -> str:
    """Return the text of a file of the kernel, which is empty if there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _named(path: Path, name: str) -> str | None:
    """Return the value of a line in a file of names and values; None without one."""
    lines = (line.split() for line in text(path).splitlines())
    return next((words[1] for words in lines if len(words) > 1 and words[0] == name), None)


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Keep freed memory in this process, and return whether that is possible, which it is only with glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30) and libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))


def return_freed_memory() -> None:
    """Return memory that this process has freed and kept to the system, as far as glibc can."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


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
    value = _named(path, "oom_kill")
    return int(value) if value is not None and value.isdigit() else None


NAME = "HORIZONML_NAME"  # what this device is called, in place of its host name
_MOST_NAME = 255  # characters

DEVICE = "HORIZONML_DEVICE"
"""The environment variable that says what a rank computes on, whatever the job says."""

_DEVICES = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?")


def check_device(requested: str, source: str) -> None:
    """Raise JobError, which names the `source` of the request, if it is not what the field `device` may say."""
    if not _DEVICES.fullmatch(requested):
        raise JobError(
            f"{source}: {requested!r} is not one of auto, cpu, cuda, cuda:N (such as cuda:1 for the second GPU) and mps"
        )


def requested_device(field: str) -> tuple[str, str]:
    """Return what the ranks of this machine are to compute on, and what says so, given the job's field.

    The option `--device` sets the environment variable for the ranks that it starts.
    """
    told = os.environ.get(DEVICE)
    return (told, f"${DEVICE} (or --device)") if told else (field, "device")


def device_name() -> str:
    """Return what this device is called in messages, records and metrics; two devices may have the same name."""
    named = os.environ.get(NAME, "").strip() or socket.gethostname()
    shown = "".join(character if character.isprintable() else " " for character in named)
    return shown[:_MOST_NAME].strip() or "device"


@functools.cache
def machine_id() -> str:
    """Return an identifier of this machine that no other machine has: its boot id, which all its containers share.

    On systems other than Linux it is the address of the first network card. A hostname would not do, because two boards
    that were set up from the same image have the same one.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{uuid.getnode():012x}"


def shared_machine() -> tuple[str, int]:
    """Return an identifier by which containers recognise that they run on one machine, and the machine's cores."""
    return machine_id()[:8], os.cpu_count() or 1


def processor_name() -> str:
    """Return the processor's name and its number of cores, for people and for the keys of caches."""
    for line in text(Path("/proc/cpuinfo")).splitlines():  # none, except on Linux
        if line.startswith(("model name", "Model\t", "Hardware")):
            return f"{line.partition(':')[2].strip()} ({os.cpu_count()} cores)"
    return f"{platform.processor() or platform.machine()} ({os.cpu_count()} cores)"


@dataclass(frozen=True)
class MachineInfo:
    """Describes a machine, for the records."""

    processor: str
    architecture: str = ""
    system: str = ""
    memory: int = 0  # bytes

    def to_json(self) -> dict[str, str | int]:
        """Return the fields as a JSON object."""
        return asdict(self)


def machine_info() -> MachineInfo:
    """Return the description of this machine."""
    return MachineInfo(processor_name(), platform.machine(), platform.platform(), psutil.virtual_memory().total)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the software used for training, by name.

    The revision is that of the source tree, or the one that the image was built from.
    """
    import torch  # slow to import, and not needed by every caller

    found = {"horizonml": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    revision = os.environ.get("HORIZONML_REVISION") or _git_revision(Path(__file__).resolve().parents[2])
    return found | ({"revision": revision} if revision else {})


def _git_revision(tree: Path) -> str | None:
    """Return the commit of a source tree, with a mark if files have changed since, or None without a repository."""
    if not (tree / ".git").exists():
        return None
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def cpu_seconds() -> float:
    """Return the seconds of CPU time of this process so far, over all its threads."""
    return time.process_time()


def seconds_up() -> float:
    """Return how many seconds ago this process was started, by a clock that nobody sets."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # see proc(5)
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError):  # not Linux
        return max(0.0, time.time() - psutil.Process().create_time())


def rss_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    statm = _open_statm()
    if statm is None:
        return int(psutil.Process().memory_info().rss)
    return int(os.pread(statm, 128, 0).split()[1]) * _PAGE


def peak_rss_bytes() -> int:
    """Return the most resident memory that this process has held so far, in bytes."""
    # Not getrusage(2): after an exec, its peak includes that of the process that called it.
    peak = _named(Path("/proc/self/status"), "VmHWM:")
    return int(peak) * 1024 if peak is not None else rss_bytes()


@functools.cache
def _open_statm() -> int | None:
    """Return the kernel's account of this process, which stays open for every step to read, or None except on Linux."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return None
