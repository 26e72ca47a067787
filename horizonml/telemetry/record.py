"""What is recorded of a training: one record per rank and step, and one per evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepRecord:
    """One step as one rank saw it. Seconds and bytes; compute + transfer + wait = wall."""

    step: int  # counted from 1 over the whole run
    epoch: int  # counted from 1
    time: float  # when it ended, Unix time
    wall: float
    compute: float
    transfer: float
    wait: float
    samples: int  # rows of the batch this rank worked on
    batch: int  # size of the global batch
    loss: float  # mean over the global batch
    accuracy: float  # training accuracy over the global batch, 0 to 1
    lr: float
    bytes_sent: int
    bytes_received: int
    links: Mapping[Any, tuple[int, int]]  # bytes sent and received: previous stage, next stage, members of this one
    cpu_seconds: float  # of this process, all its threads
    rss_bytes: int
    joules: float | None  # used by this machine, on its first rank only; None where the machine does not tell
    divergence: float | None  # |g_i - g| / |g| of this member's gradient before reduction, on measured steps

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"kind": "step", **vars(self)}


@dataclass(frozen=True)
class EvaluationRecord:
    """Loss and accuracy on held-out data after an epoch."""

    step: int
    epoch: int
    time: float
    seconds: float
    loss: float
    accuracy: float
    samples: int

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"kind": "evaluation", **vars(self)}
