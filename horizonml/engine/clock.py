"""Measures where the time of a step goes: every moment belongs to exactly one of compute, transfer and wait.

- compute: this rank works (forward, backward, update, or reading its data itself).
- transfer: this rank is blocked while bytes move that their sender has begun to send.
- wait: this rank is blocked because another rank, or a worker that loads its data, is not ready yet.

The spans called `LOAD` are what loading ahead did not hide: waiting for workers, or compute where a rank reads samples
when it needs them.

The clock is switched and never stopped, so the three add up to the wall time. Each of them is measured; none is
inferred.
"""

from __future__ import annotations

from time import perf_counter, time
from typing import Literal, NamedTuple

Kind = Literal["compute", "transfer", "wait"]
KINDS: tuple[Kind, ...] = ("compute", "transfer", "wait")

LOAD = "load"  # what a rank does while a step cannot go on without its data


class Span(NamedTuple):
    """Describes one stretch of a step, in seconds of `time.perf_counter`."""

    kind: Kind
    what: str  # "forward", "backward", "update", ...
    micro: int  # the micro-batch, or -1
    start: float
    end: float


class Clock:
    """Attributes time to what the rank is doing.

    A step begins where the previous one ended, so the recording and sampling between two steps count as compute of the
    later one. Call `pause` to exclude the time between them.
    """

    def __init__(self) -> None:
        self._between_steps = False
        self._since = 0.0
        self.restart()

    def restart(self) -> None:
        """Begin a new step, in compute."""
        self.spans: list[Span] = []
        self.totals: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        self._kind: Kind = "compute"
        self._what, self._micro = "prepare", -1
        if not self._between_steps:
            self._since = perf_counter()
        self._started = self._since
        self._between_steps = False

    def switch(self, kind: Kind, what: str, micro: int = -1) -> None:
        """Attribute the time from now on to `kind`."""
        now = perf_counter()
        self.totals[self._kind] += now - self._since
        self.spans.append(Span(self._kind, self._what, self._micro, self._since, now))
        self._kind, self._what, self._micro, self._since = kind, what, micro, now

    @property
    def current(self) -> tuple[Kind, str, int]:
        """Return the arguments of the last `switch`, which say what the time is attributed to now."""
        return self._kind, self._what, self._micro

    def finish(self) -> float:
        """End the step and return its wall time in seconds."""
        self.switch("compute", "prepare")
        self._between_steps = True
        return self._since - self._started

    @property
    def load(self) -> float:
        """Return the seconds of the step that went into getting its data."""
        return sum(span.end - span.start for span in self.spans if span.what == LOAD)

    def pause(self) -> None:
        """Exclude the time until the next step from every step."""
        self._between_steps = False

    @staticmethod
    def unix_offset() -> float:
        """Return the seconds to add to the times of a span to get Unix time."""
        return time() - perf_counter()
