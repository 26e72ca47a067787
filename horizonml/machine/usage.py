"""CPU time and memory of this process."""

from __future__ import annotations

import functools
import os
import time

import psutil

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def cpu_seconds() -> float:
    """CPU time of this process so far, over all its threads."""
    return time.process_time()


def rss_bytes() -> int:
    """Resident memory of this process."""
    statm = _open_statm()
    if statm is None:
        return int(psutil.Process().memory_info().rss)
    return int(os.pread(statm, 128, 0).split()[1]) * _PAGE


@functools.cache
def _open_statm() -> int | None:
    """The kernel's account of this process, kept open because it is read after every step; None if not on Linux."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return None
