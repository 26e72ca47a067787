"""Emulates small devices with the ranks of one machine, so that one can see there what connecting devices is worth.

A rank that stands for a device with a part q of a core, and that has computed for t seconds, waits for t (1/q - 1)
seconds, as a quota of a container would have it do. Processor time of threads in the background counts, too, up to that
of the one that trains, so what sending and adding costs is included. Links between such devices are those of this
machine, and have no limit. Everything that a run records and shows calls these devices emulated.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence

from horizonml.errors import JobError
from horizonml.machine.host import EMULATED_CORES, NAME, available_cores
from horizonml.text import count

EMULATE = "HORIZONML_EMULATE"
"""The environment variable that tells a launcher of ranks how many cores each of them has, separated by commas."""

_LEAST, _MOST = 0.01, 64.0  # cores of a device
_SLACK = 1e-3  # seconds that a sleep may have been too long, which the next one makes up for
_SHORTEST = 2e-4  # seconds, below which a debt is kept for the next time


def parse_cores(text: str, source: str = "--emulate") -> tuple[float, ...]:
    """Return the cores of devices, in order; there are none in an empty text. Raises JobError that names the source."""
    try:
        cores = tuple(float(word) for word in text.split(",")) if text.strip() else ()
    except ValueError:
        cores = (0.0,)
    if not all(_LEAST <= one <= _MOST for one in cores):
        raise JobError(
            f"{source}: {text!r} should be the cores of every device, from {_LEAST:g} to {_MOST:g} and separated by "
            "commas, for example 0.4 for five equal devices, or 0.8,0.4,0.4,0.2,0.2"
        )
    return cores


def emulated_devices(ranks: int, environ: Mapping[str, str] = os.environ) -> tuple[float, ...]:
    """Return the cores of the device that each rank stands for, or nothing if ranks are not to be emulated.

    One number is meant for every device. A rank by itself is the fastest of them. Raises JobError.
    """
    cores = parse_cores(environ.get(EMULATE, ""), f"${EMULATE} (or --emulate)")
    if not cores:
        return ()
    if ranks == 1:
        return (max(cores),)
    if len(cores) not in (1, ranks):
        raise JobError(
            f"--emulate: {count(len(cores), 'device')} for {count(ranks, 'rank')}; name as many devices as there are "
            "ranks (--workers), or one number for all of them"
        )
    return cores * ranks if len(cores) == 1 else cores


def too_many(cores: Sequence[float]) -> str | None:
    """Return a warning if this machine is too small to stand for such devices, or None."""
    there = available_cores()
    if sum(cores) <= there:
        return None
    return (
        f"warning: the emulated devices have {sum(cores):g} cores together, and this machine has {there:g}, so they "
        "are slower than they should be when all of them compute"
    )


def of_rank(cores: Sequence[float], rank: int) -> dict[str, str]:
    """Return the environment variables that make a rank one of these devices; none if there are none."""
    if not cores:
        return {}
    return {EMULATED_CORES: f"{cores[rank]:g}", NAME: f"emulated-{rank}-with-{cores[rank]:g}-cores"}


def is_emulated() -> bool:
    """Return whether this process stands for a device of its own."""
    return EMULATED_CORES in os.environ


class DevicePace:
    """Holds this process back to the cores of the device that it stands for."""

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._owed = 0.0  # seconds that this process is ahead of its device
        self._now = self._read()

    def keep(self, *, may_sleep: bool) -> None:
        """Take what was computed since the last call into account, and wait until the device would be done with it.

        Time in which a device has nothing to do cannot be saved for later. Where this process must not sleep, as
        another one may wait for it, its debt is kept.
        """
        self._count()
        if may_sleep and self._owed > _SHORTEST:
            time.sleep(self._owed)
            self._count()

    def _count(self) -> None:
        now = self._read()
        wall, own, others = (after - before for after, before in zip(now, self._now, strict=True))
        self._now = now
        # What works in the background, such as the search for a plan, would not make a device stand still for long.
        used = own + min(others, own * math.ceil(self._cores))
        self._owed = max(-_SLACK, self._owed + used / self._cores - wall)

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Return the time, and the processor time of this thread and of the others."""
        own = time.thread_time()
        return time.perf_counter(), own, time.process_time() - own


def pace_here() -> DevicePace | None:
    """Return what holds this process back, or None if it stands for no other device than this machine."""
    return DevicePace(float(os.environ[EMULATED_CORES])) if is_emulated() else None


def emulated_host(machine: str, rank: int) -> str:
    """Return the identity of the device that a rank on this machine stands for."""
    return f"{machine}#{rank}"


def machine_of(host: str) -> str:
    """Return the identity of the machine that a device is, or on which it is emulated."""
    return host.partition("#")[0]
