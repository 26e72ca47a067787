"""Measures the CPU time and the memory of this process."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

import psutil

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
