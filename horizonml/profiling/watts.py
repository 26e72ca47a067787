"""Finds out how many watts a device draws, idle and busy: as its environment states, or by measuring."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping

import torch

from horizonml.errors import JobError
from horizonml.machine.energy import EnergyMeter
from horizonml.planner.objective import MOST_WATTS, Watts

VARIABLE = "HORIZONML_WATTS"
_WAIT_SECONDS = 1.0  # in which the device does nothing
_WORK_SECONDS = 1.5  # in which it computes
_EVERY = 0.05  # seconds between two readings of a sensor that tells power
_SIZE = 384  # of the matrices that are multiplied


def stated_watts(environment: Mapping[str, str] = os.environ) -> Watts | None:
    """Return the watts that the environment states, as `2.5/6` (idle/busy), or None. Raises JobError."""
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        idle, busy = (float(part) for part in text.split("/"))
    except ValueError:
        idle = busy = math.nan
    if not 0 <= idle <= busy <= MOST_WATTS:
        raise JobError(
            f"{VARIABLE}: {ascii(text)[:40]} is not IDLE/BUSY in watts, such as 2.5/6: what the device draws while it "
            "waits, and while it computes, which is not less"
        )
    return Watts(idle, busy)


def measured_watts(
    meter: EnergyMeter, wait_seconds: float = _WAIT_SECONDS, work_seconds: float = _WORK_SECONDS
) -> Watts | None:
    """Return what this machine draws while this process waits, and while it computes with its threads.

    That takes a few seconds. Return None if the machine has no counters of energy that can be read.
    """
    if not meter.available:
        return None
    idle = _power(meter, wait_seconds, works=False)
    return Watts(idle, max(idle, _power(meter, work_seconds, works=True)))


def device_watts(meter: EnergyMeter, sharing: int, measure: bool) -> Watts | None:
    """Return a rank's watts on a machine that `sharing` ranks share: stated, or measured if `measure` is set.

    Ranks share the machine's idle watts evenly. What is stated for a busy machine holds while all of them compute, and
    is shared, too; what is measured is what the calling rank adds by itself. Raises JobError.
    """
    stated = stated_watts()
    if stated is not None:
        return Watts(stated.idle / sharing, stated.busy / sharing)
    found = measured_watts(meter) if measure else None
    return Watts(found.idle / sharing, found.idle / sharing + found.added) if found is not None else None


def _power(meter: EnergyMeter, seconds: float, works: bool) -> float:
    """Return the mean power in so many seconds."""
    matrix = torch.rand(_SIZE, _SIZE)
    before, began = meter.joules() or 0.0, time.monotonic()
    end = began + seconds
    while time.monotonic() < end:
        pause = time.monotonic() + _EVERY
        while works and time.monotonic() < pause:
            torch.mm(matrix, matrix)
        time.sleep(max(0.0, pause - time.monotonic()))
        meter.joules()
    return ((meter.joules() or 0.0) - before) / (time.monotonic() - began)
