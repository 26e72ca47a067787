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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, time
from typing import Literal, NamedTuple, Protocol

from horizonml.machine.emulation import DevicePace

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

    def __init__(self, watch: DeviceWatch | None = None, pace: DevicePace | None = None) -> None:
        """Begin; `watch` tells of an accelerator that computes while this process waits.

        With a `pace`, computing takes as long as on the device that this process stands for.
        """
        self._watch, self._pace = watch, pace
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
        if self._pace is not None:
            self._pace.keep(may_sleep=self._kind == "compute")
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


Way = Literal["previous", "next", "members"]  # earlier stages, later stages, and other members of the same stage


@dataclass(frozen=True)
class Totals:
    """Holds what all ranks agree on after a step or an evaluation; `metrics` has the task's metrics by name."""

    loss: float
    metrics: dict[str, float]
    samples: int
    stop: bool = False
    newcomers: bool = False
    behind: bool = False  # whether a follower has not caught up yet (see `state.follow`)
    hurry: bool = False  # whether a follower has no room for the gradients of more steps
    look: bool = False  # whether a rank wants to compare the step's times with the plan
    finite: bool = True  # whether the gradients of all stages with a single member are finite
    units: int = 0  # what the loss is a mean over: samples or, for example, tokens
    unit: str = "samples"


WAYS: tuple[Way, ...] = ("previous", "next", "members")


class StepSums(NamedTuple):
    """What a rank tells the others of the steps that it has not told them of yet: sums over these `steps`."""

    wall: float = 0.0
    compute: float = 0.0
    transfer: float = 0.0
    wait: float = 0.0
    cpu_seconds: float = 0.0  # of the process
    rss_bytes: float = 0.0  # the most of them
    sent_previous: float = 0.0  # bytes
    sent_next: float = 0.0
    sent_members: float = 0.0
    received_previous: float = 0.0
    received_next: float = 0.0
    received_members: float = 0.0
    steps: float = 0.0

    @classmethod
    def of(cls, step: StepResult, cpu_seconds: float, rss_bytes: float) -> StepSums:
        """Return what a rank tells of a step, in which its process has used so much of a processor and of memory."""
        moved = [step.traffic[way][place] for place in (0, 1) for way in WAYS]
        return cls(step.wall, step.compute, step.transfer, step.wait, cpu_seconds, rss_bytes, *moved)._replace(
            steps=1.0
        )

    def plus(self, other: StepSums) -> StepSums:
        """Return what both tell together."""
        sums = StepSums(*(one + more for one, more in zip(self, other, strict=True)))
        return sums._replace(rss_bytes=max(self.rss_bytes, other.rss_bytes))

    @property
    def links(self) -> Mapping[Way, tuple[float, float]]:
        """Return the bytes sent and received."""
        return dict(zip(WAYS, zip(self[6:9], self[9:12], strict=True), strict=True))


@dataclass(frozen=True)
class StepResult:
    """Describes one training step as this rank saw it; its times are in seconds and add up to `wall`."""

    totals: Totals
    wall: float
    compute: float
    transfer: float
    wait: float
    samples: int  # rows of the batch that this rank worked on
    entered: int  # rows that entered the first stage on this rank; over all ranks they add up to the batch
    traffic: dict[Way, tuple[int, int]]  # bytes sent and received
    divergence: float | None
    spans: list[Span]
    load: float = 0.0  # seconds of `wait` or `compute` that went into getting the data; see `Clock`
    gradient_norm: float | None = None  # over all stages, before clipping; None if gradients are not clipped
    local_steps: int | None = None  # updates that this rank's replica made by itself; None without local steps
    ahead: bool = False  # whether its replica took the step while another one was late with a synchronisation
    told: tuple[StepSums, ...] = ()  # what every rank has told since the step before; empty for a rank alone

    @property
    def bytes_sent(self) -> int:
        """Return the number of bytes sent to all other ranks."""
        return sum(sent for sent, _ in self.traffic.values())

    @property
    def bytes_received(self) -> int:
        """Return the number of bytes received from all other ranks."""
        return sum(received for _, received in self.traffic.values())


def merged(steps: Sequence[StepResult], tail: StepResult) -> StepResult:
    """Return local steps, and what came after them, as one step, with the totals and the divergence of the latter."""
    every = [*steps, tail]
    norms = [step.gradient_norm for step in steps if step.gradient_norm is not None]
    return StepResult(
        tail.totals,
        wall=sum(step.wall for step in every),
        compute=sum(step.compute for step in every),
        transfer=sum(step.transfer for step in every),
        wait=sum(step.wait for step in every),
        samples=sum(step.samples for step in every),
        entered=sum(step.entered for step in every),
        traffic={
            way: (sum(step.traffic[way][0] for step in every), sum(step.traffic[way][1] for step in every))
            for way in WAYS
        },
        divergence=tail.divergence,
        spans=[span for step in every for span in step.spans],
        load=sum(step.load for step in steps),
        gradient_norm=norms[-1] if norms else None,
        told=tail.told,
        local_steps=len(steps),
    )
