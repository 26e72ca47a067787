"""Describes this host (its identity, its processor, its software) and what this process uses of it."""

from __future__ import annotations

import functools
import os
import platform
import re
import socket
import subprocess
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from horizonml import __version__
from horizonml.errors import JobError

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
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model\t", "Hardware")):
                return f"{line.partition(':')[2].strip()} ({os.cpu_count()} cores)"
    except OSError:
        pass  # not Linux
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
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return rss_bytes()
    peak = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return int(peak) * 1024 if peak is not None else rss_bytes()


@functools.cache
def _open_statm() -> int | None:
    """Return the kernel's account of this process, which stays open for every step to read, or None except on Linux."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return None
