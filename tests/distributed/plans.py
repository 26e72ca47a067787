"""Plans for tests, by their members."""

from __future__ import annotations

from dataclasses import dataclass

from horizonml.plan.plan import Plan, Stage, Sync

ONE, TWO = (1.0,), (1.0, 1.0)


@dataclass(frozen=True)
class Shape:
    """A plan by the shares of the members of each stage."""

    members: tuple[tuple[float, ...], ...]
    sync: Sync = Sync.ALL_REDUCE
    micro_batches: int = 2
    schedule: str = "1f1b"

    @property
    def world_size(self) -> int:
        return sum(map(len, self.members))

    def plan(self, layers: int) -> Plan:
        """The plan for a model of so many layers, which are divided evenly."""
        found, rank = [], 0
        for number, shares in enumerate(self.members):
            start, stop = (layers * (number + k) // len(self.members) for k in (0, 1))
            own = self.sync if len(shares) > 1 else Sync.ALL_REDUCE
            found.append(Stage(start, stop, tuple(range(rank, rank + len(shares))), shares, own))
            rank += len(shares)
        return Plan(tuple(found), self.schedule, self.micro_batches)
