"""What a step or an evaluation comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from horizonml.engine.clock import Span

Way = Literal["previous", "next", "members"]  # stages before, stages after, and other members of the same stage


@dataclass(frozen=True)
class Totals:
    """What all ranks agree on after a step or an evaluation. Metrics are means over units, by name."""

    loss: float
    metrics: dict[str, float]
    samples: int
    stop: bool = False
    newcomers: bool = False
    finite: bool = True  # whether all gradients are that no other member has a part of


@dataclass(frozen=True)
class Step:
    """One training step as this rank saw it. Times in seconds; they add up to `wall`."""

    totals: Totals
    wall: float
    compute: float
    transfer: float
    wait: float
    samples: int  # rows of the batch that this rank worked on
    entered: int  # rows of the batch that entered the first stage here: over all ranks they add up to the batch
    traffic: dict[Way, tuple[int, int]]  # bytes sent and received
    divergence: float | None
    spans: list[Span]

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to all other ranks."""
        return sum(sent for sent, _ in self.traffic.values())

    @property
    def bytes_received(self) -> int:
        """Bytes received from all other ranks."""
        return sum(received for _, received in self.traffic.values())
