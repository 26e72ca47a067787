"""Lists the strategies that a job may ask for, each as what it fixes about a plan."""

from __future__ import annotations

from dataclasses import dataclass

from horizonml.plan.syncs import SYNCS, Sync


@dataclass(frozen=True)
class StrategyFacts:
    """States what a strategy fixes: a row of `STRATEGIES`."""

    min_workers: int = 1
    max_workers: int | None = None  # None means no limit
    least_stages: int = 1
    most_stages: int | None = None
    most_members: int | None = None  # of a stage
    sync: Sync = Sync.ALL_REDUCE  # of stages with several members
    is_free: bool = False  # whether the planner measures every device, and chooses the kind of plan, too
    local_steps: bool = False  # whether its ranks may take local steps

    @property
    def sums(self) -> bool:
        """Return whether a stage may have several members, which sum gradients."""
        return self.max_workers != 1 and self.most_members != 1

    @property
    def sends(self) -> bool:
        """Return whether activations may travel between stages."""
        return self.most_stages != 1

    @property
    def micro_batches(self) -> bool:
        """Return whether batches may be split into micro-batches."""
        return not self.sync.alone

    @property
    def compressions(self) -> list[str]:
        """Return the values of `parallel.gradient_compression` that it can use."""
        found = [one.compression for one in SYNCS.values() if one.compression and one.exactly is self.sync]
        return found if self.sums else []


STRATEGIES = {
    "single": StrategyFacts(max_workers=1, most_stages=1),
    "ddp": StrategyFacts(most_stages=1, local_steps=True),
    "pipeline": StrategyFacts(most_members=1),
    "hybrid": StrategyFacts(min_workers=3, least_stages=2),
    "auto": StrategyFacts(is_free=True, local_steps=True),
    "tensor": StrategyFacts(most_stages=1, sync=Sync.CHANNELS),
    "horovod": StrategyFacts(most_stages=1, sync=Sync.HOROVOD),
}
EXPLICIT = "explicit stages"  # what a plan of `parallel.stages` is called, unless its sync has a strategy of its own
_EXPLICIT = StrategyFacts(local_steps=True)


def facts_of(strategy: str) -> StrategyFacts:
    """Return what a strategy fixes, or what explicit stages do."""
    return STRATEGIES.get(strategy, _EXPLICIT)
