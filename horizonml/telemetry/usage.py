"""CPU time and memory of this process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_STATM = Path("/proc/self/statm")


def cpu_seconds() -> float:
    """CPU time of this process so far, over all its threads."""
    return time.process_time()


def rss_bytes() -> int:
    """Resident memory of this process."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE
    except OSError:  # not Linux
        return int(psutil.Process().memory_info().rss)
