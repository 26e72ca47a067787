"""Measures how fast a device computes, by a small piece of work that is always the same.

A rank that has nothing to do in a plan has no step times either. By this it can tell whether its device is as fast
again as it was when the plan was made.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

_SIZE = 192  # rows and columns
_SECONDS = 0.01  # of a sample, about
_EVERY = 0.2  # seconds from one sample to the next
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
        self._sampled = -_EVERY

    def sample(self) -> None:
        """Take a sample, unless the last one is not long ago."""
        if self._clock() - self._sampled >= _EVERY:
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
        one = torch.full((_SIZE, _SIZE), 0.5)
        start = self._clock()
        for _ in range(self._products):
            one = (one @ one) / _SIZE
        return self._clock() - start
