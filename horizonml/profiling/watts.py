"""Finds out how many watts a device draws, idle and busy: as its environment states, or by measuring.

Measures how fast a device computes, by a small piece of work that is always the same.

A rank that has nothing to do in a plan has no step times either. By this it can tell whether its device is as fast
again as it was when the plan was made.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping

import torch

from horizonml.errors import JobError
from horizonml.machine.sensors import EnergyMeter
from horizonml.planner.problem import MOST_WATTS, Watts

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


_PACE_SIZE = 192  # rows and columns
_SECONDS = 0.01  # of a sample, about
_PACE_EVERY = 0.2  # seconds from one sample to the next
_ENOUGH, _MOST = 25, 50  # samples: a device that is stopped now and then is not so in every sample


class Pace:
    """Compares the speed of a device with what it was at first."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Measure the speed that later ones are compared with."""
        self._clock, self._products = clock, 1
        self._work()  # warms up
        self._products = max(1, min(1000, round(_SECONDS / max(1e-6, self._work()))))
        self._first = min(self._work() for _ in range(3))
        self._samples: deque[float] = deque(maxlen=_MOST)
        self._sampled = -_PACE_EVERY

    def sample(self) -> None:
        """Take a sample, unless the last one is not long ago."""
        if self._clock() - self._sampled >= _PACE_EVERY:
            self._samples.append(self._work())
            self._sampled = self._clock()

    def forget(self) -> None:
        """Begin anew: the samples until now are of no use any longer."""
        self._samples.clear()

    def factor(self) -> float | None:
        """Return how many times as long the work takes as at first, or None if there are too few samples to tell."""
        if len(self._samples) < _ENOUGH:
            return None
        return sum(self._samples) / len(self._samples) / max(1e-9, self._first)

    @torch.no_grad()
    def _work(self) -> float:
        one = torch.full((_PACE_SIZE, _PACE_SIZE), 0.5)
        start = self._clock()
        for _ in range(self._products):
            one = (one @ one) / _PACE_SIZE
        return self._clock() - start
