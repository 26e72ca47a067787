"""What the workers and micro-batches of a strategy can be, for whoever varies them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StrategyLimits:
    """How many workers a strategy can have, and whether it splits batches into micro-batches."""

    min_workers: int = 1
    max_workers: int | None = None  # None: as many as there are
    micro_batches: bool = True


_LIMITS = {
    "single": StrategyLimits(max_workers=1),
    "hybrid": StrategyLimits(min_workers=3),
    "tensor": StrategyLimits(micro_batches=False),
    "horovod": StrategyLimits(micro_batches=False),
}


def limits_of(strategy: str) -> StrategyLimits:
    """Return the limits of a strategy, which for most of them are none."""
    return _LIMITS.get(strategy, StrategyLimits())
