"""Defines how many workers and micro-batches a strategy can have, for code that varies them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StrategyLimits:
    """Tells how many workers a strategy can have, and whether it splits batches into micro-batches."""

    min_workers: int = 1
    max_workers: int | None = None  # None means no limit
    micro_batches: bool = True


_LIMITS = {
    "single": StrategyLimits(max_workers=1),
    "hybrid": StrategyLimits(min_workers=3),
    "tensor": StrategyLimits(micro_batches=False),
    "horovod": StrategyLimits(micro_batches=False),
}


def limits_of(strategy: str) -> StrategyLimits:
    """Return the limits of a strategy; most strategies have none."""
    return _LIMITS.get(strategy, StrategyLimits())
