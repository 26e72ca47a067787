"""Holds the results of a training step and of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from horizonml.engine.clock import Span

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


class Told(NamedTuple):
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

    def plus(self, other: Told) -> Told:
        """Return what both tell together."""
        sums = Told(*(one + more for one, more in zip(self, other, strict=True)))
        return sums._replace(rss_bytes=max(self.rss_bytes, other.rss_bytes))

    @property
    def links(self) -> Mapping[Way, tuple[float, float]]:
        """Return the bytes sent and received."""
        return dict(zip(WAYS, zip(self[6:9], self[9:12], strict=True), strict=True))


@dataclass(frozen=True)
class Step:
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
    told: tuple[Told, ...] = ()  # what every rank has told since the step before; empty for a rank alone

    @property
    def bytes_sent(self) -> int:
        """Return the number of bytes sent to all other ranks."""
        return sum(sent for sent, _ in self.traffic.values())

    @property
    def bytes_received(self) -> int:
        """Return the number of bytes received from all other ranks."""
        return sum(received for _, received in self.traffic.values())
