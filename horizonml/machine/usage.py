"""Measures the CPU time and the memory of this process."""

from __future__ import annotations

import functools
import os
import time

import psutil

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def cpu_seconds() -> float:
    """Return the seconds of CPU time of this process so far, over all its threads."""
    return time.process_time()


def rss_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    statm = _open_statm()
    if statm is None:
        return int(psutil.Process().memory_info().rss)
    return int(os.pread(statm, 128, 0).split()[1]) * _PAGE


@functools.cache
def _open_statm() -> int | None:
    """Return the kernel's account of this process, which stays open for every step to read, or None except on Linux."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return None
