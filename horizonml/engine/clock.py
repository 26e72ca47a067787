"""Measures where the time of a step goes: every moment belongs to exactly one of compute, transfer and wait.

- compute: this rank works (forward, backward, update, or reading its data itself).
- transfer: this rank is blocked while bytes move that their sender has begun to send.
- wait: this rank is blocked because another rank, or a worker that loads its data, is not ready yet.

The spans called `LOAD` are what loading ahead did not hide: waiting for workers, or compute where a rank reads samples
when it needs them.

The clock is switched and never stopped, so the three add up to the wall time. Each of them is measured; none is
inferred. Where an accelerator computes, the process only hands it work, and goes on to wait for others meanwhile: that
time is compute for as long as the accelerator was busy, which a `DeviceWatch` tells.
"""

from __future__ import annotations

from time import perf_counter, time
from typing import Literal, NamedTuple, Protocol

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


class DeviceWatch(Protocol):
    """Tells when an accelerator was done with its work, without waiting for it."""

    def mark(self) -> None:
        """Take note of all work that the device has been given."""

    def finished(self) -> float | None:
        """Return when the device was done with what was marked, a time of `perf_counter`; None if it is not."""


class Clock:
    """Attributes time to what the rank is doing.

    A step begins where the previous one ended, so the recording and sampling between two steps count as compute of the
    later one. Call `pause` to exclude the time between them.
    """

    def __init__(self, watch: DeviceWatch | None = None) -> None:
        """Begin; `watch` tells of an accelerator that computes while this process waits."""
        self._watch = watch
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
        if self._watch is not None:
            self._ask(self._watch, kind)
        now = perf_counter()
        self.totals[self._kind] += now - self._since
        self.spans.append(Span(self._kind, self._what, self._micro, self._since, now))
        self._kind, self._what, self._micro, self._since = kind, what, micro, now

    def _ask(self, watch: DeviceWatch, kind: Kind) -> None:
        """Take the time for compute in which this rank has only waited while its accelerator was still busy."""
        if self._kind != "compute":
            now, finished = perf_counter(), watch.finished()
            end = now if finished is None else min(finished, now)
            if end > self._since:
                self.totals["compute"] += end - self._since
                self.spans.append(Span("compute", "device", self._micro, self._since, end))
                self._since = end
        elif kind != "compute":
            watch.mark()

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
