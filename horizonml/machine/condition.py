"""Finds out what slows a device down, such as heat or other programs, in words and, if known, as a factor.

A rank looks at its device every few seconds. When its condition changes, it tells the other ranks in the agreement on
a step, so that they need not wait until the slowdown shows in their statistics.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from horizonml.machine.resources import ProcessorSeconds, is_other_rank, processor_seconds, share_of_others
from horizonml.machine.sensors import ProcessorClock, clock
from horizonml.text import percent

_LOOK_SECONDS = 2.0  # between two looks at the device
_LESS = 0.5  # of what makes a condition worth telling: below that, it is over
_LASTS_SECONDS = 4.0  # for which a condition must be the case before it is told
_SLOWER = 1.1  # a clock must be held back by this factor to be told
_MORE = 0.25  # of the machine's cores that other programs use beyond what they used at first
_USUAL_SECONDS = 10.0  # of the beginning, in which the use by other programs counts as usual


@dataclass(frozen=True)
class Slowdown:
    """Says what holds a device back: by which factor, as far as the clock tells it, and why."""

    factor: float = 1.0
    reason: str = ""  # goes on from "because"; empty if nothing does

    def alike(self, other: Slowdown) -> bool:
        """Return whether two states are the same for those who plan."""
        return bool(self.reason) == bool(other.reason) and max(self.factor, other.factor) < _SLOWER * min(
            self.factor, other.factor
        )


class Condition:
    """Watches a device from its creation on, when it is taken to be in its usual condition."""

    def __init__(
        self,
        read: Callable[[], ProcessorClock] = clock,
        others: Callable[[Collection[int]], ProcessorSeconds] = processor_seconds,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to watch; `read` reads the sensors, and `others` how long everything and this program computed."""
        self._read, self._others, self._now = read, others, now
        self._first, self._looked = read(), now()
        self.siblings: Collection[int] = ()  # processes of other ranks on this machine, which are no other programs
        self._load, self._begun = others(()), now()
        self._usual: float | None = None
        self._share: float | None = None
        self.state = Slowdown()  # the last one that was told
        self._next, self._since = Slowdown(), now()

    def changed(self) -> bool:
        """Return whether the device's condition is another one than `state`; looks at the device now and then."""
        now = self._now()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            found = self._look(now)
            if not found.alike(self._next):
                self._since = now
            self._next = found
        return not self._next.alike(self.state) and now - self._since >= _LASTS_SECONDS

    def tell(self, news: bool) -> Slowdown:
        """Return what holds the device back now; if that is `news`, only another condition is from now on."""
        if news:
            self.state = self._next
        return self._next

    def _look(self, now: float) -> Slowdown:
        found, first = self._read(), self._first
        factor = 1.0
        if found.hertz and first.hertz:
            factor = max(1.0, first.hertz / found.hertz)
        if found.hot or factor >= 1 + (_SLOWER - 1) * self._bar:
            details = found.describe()
            what = "its processor is too hot" if found.hot else "its processor's clock is held back"
            return Slowdown(factor, f"{what}: {details}" if details else what)
        return Slowdown(1.0, self._busy(now))

    @property
    def _bar(self) -> float:
        return _LESS if self.state.reason else 1.0

    def _busy(self, now: float) -> str:
        """Return in words that other programs use more of the processor than usual, or nothing."""
        if not all(map(is_other_rank, self.siblings)):
            return ""  # ranks in other containers of this machine look like other programs
        load = self._others(self.siblings)
        if load[0] - self._load[0] >= _LOOK_SECONDS:
            self._share = share_of_others(self._load, load, os.cpu_count() or 1)
            self._load = load
        if self._share is None:
            return ""
        if self._usual is None or now - self._begun < _USUAL_SECONDS:
            self._usual = max(self._share, self._usual or 0.0)
        if self._share <= self._usual + _MORE * self._bar:
            return ""
        return f"other programs use {percent(self._share, 0)} of its processor"
