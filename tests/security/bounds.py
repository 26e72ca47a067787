"""Measures what an attack takes: memory at its highest, and descriptors that stay open."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MIB = 1 << 20
_CLOSING_SECONDS = 10.0


def descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def resident(field: str) -> int:
    """Return the bytes of memory that this process holds (VmRSS), or held at most since it was reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


@contextmanager
def bounded(mebibytes: int) -> Iterator[None]:
    """Fail if the block takes more memory than this at any moment, or leaves a descriptor open."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest use so far; see proc(5)
    memory, files = resident("VmRSS"), descriptors()
    yield
    taken = resident("VmHWM") - memory
    gc.collect()
    assert taken < mebibytes * MIB, f"{taken / MIB:.0f} MiB were taken"
    until = time.monotonic() + _CLOSING_SECONDS
    while descriptors() > files and time.monotonic() < until:  # a server closes its side a moment later
        time.sleep(0.05)
    assert descriptors() <= files, f"{descriptors() - files} descriptors were left open"
