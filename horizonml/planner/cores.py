"""Models how fast ranks compute over time when they share a quota, or when they or their containers share a machine.

Three things slow down ranks that compute at once on a machine, and all of them were measured:

- They fill the caches and the memory's bandwidth for one another. `Host.contention` has the factor.
- Where they outnumber the cores, some share one. The kernel keeps a thread on its core, and moves it only to a core
  that has become idle; so for hundreds of milliseconds, of five ranks on four cores two have half a core, and three
  have a whole one. The step waits for the slow ones.
- A quota stops its container once the allowance is used up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from horizonml.planner.hardware import Contention, Host, slowdown

_EPSILON = 1e-12
_QUOTA_PERIOD = 0.1  # seconds; the default of Linux, Docker and Kubernetes


@dataclass
class Cores:
    """Models the cores that a host may use, its ranks that compute now, and the work that each has left.

    A host with less than one core has a quota: its container may use a whole core until its allowance is used up. The
    allowance grows continuously, but never beyond what one period of the quota grants.
    """

    cores: float
    machine: Machine
    allowance: float = 0.0  # seconds of a core
    left: dict[int, float] = field(default_factory=dict)  # seconds on a core of its own, by rank

    @property
    def demand(self) -> float:
        """Return the part of a core that each of the host's ranks would use now if it had one to itself."""
        limit = 1.0 if self.cores < 1 and self.allowance > 0 else self.cores
        return min(1.0, limit / len(self.left)) if self.left and not self.machine.whole(self) else 1.0


class Rate(NamedTuple):
    """Says how fast a rank computes: the part of a core that it uses, and the work that it does with it a second."""

    used: float
    speed: float


@dataclass
class Machine:
    """Describes a physical machine, the hosts on it, and which of its cores their ranks compute on."""

    number: int
    cores: float
    contention: Contention = ()
    dedicated: bool = False  # to a single rank, which always computes at full speed
    version: int = 0  # counts changes of speed, so that outdated forecasts can be recognised
    hosts: list[Cores] = field(default_factory=list)
    now: float = 0.0
    _place: dict[int, int] = field(default_factory=dict)  # the core that each rank computes on
    _rates: dict[int, Rate] | None = None

    def whole(self, host: Cores) -> bool:
        """Return whether a host is the whole machine, so that nothing but its cores limits its ranks."""
        return len(self.hosts) == 1 and host.cores >= 1 and self.cores == int(self.cores)

    @property
    def rates(self) -> dict[int, Rate]:
        """Return how fast each rank computes now."""
        if self._rates is None:
            wanted = {rank: host.demand for host in self.hosts for rank in host.left}
            total = sum(wanted.values())
            slow = slowdown(self.contention, total)
            load = [0.0] * int(self.cores)
            for rank, part in wanted.items():
                load[self._place[rank]] += part
            self._rates = {}
            for rank, part in wanted.items():
                share = 1 / max(1.0, load[self._place[rank]])
                self._rates[rank] = Rate(part * share, part * share / slow)
        return self._rates

    @property
    def next_change(self) -> float:
        """Return the seconds until the first rank finishes, or an allowance is used up; infinite if none computes."""
        rates, soonest = self.rates, math.inf
        for host in self.hosts:
            used = 0.0
            for rank, left in host.left.items():
                rate = rates[rank]
                used += rate.used
                soonest = min(soonest, left / rate.speed)
            if host.cores < 1 and host.allowance > 0 and used > host.cores:
                soonest = min(soonest, host.allowance / (used - host.cores))
        return soonest

    def begin(self, host: Cores, rank: int, work: float) -> None:
        """Let a rank begin to compute, on an idle core if there is one, or else beside the fewest others."""
        counts = self._counts()
        fewest = min(counts)
        before = self._place.get(rank)
        if before is None or counts[before] > fewest:
            self._place[rank] = counts.index(fewest)
        host.left[rank] = work
        self._rates = None

    def end(self) -> list[int]:
        """Let the ranks that have nothing left stop, and return them; who begins again at once keeps its core."""
        least, ended = _EPSILON + 1e-9 * self.now, []
        for host in self.hosts:
            own = [rank for rank, left in host.left.items() if left <= least]
            for rank in own:
                del host.left[rank]
            ended += own
        if ended:
            self._rates = None
        return ended

    def balance(self) -> None:
        """Let cores that have become idle take over ranks that share others."""
        counts = self._counts()
        while 0 in counts and max(counts) > 1:
            idle, busiest = counts.index(0), counts.index(max(counts))
            self._place[next(r for h in self.hosts for r in h.left if self._place[r] == busiest)] = idle
            counts[idle], counts[busiest] = 1, counts[busiest] - 1
            self._rates = None

    def _counts(self) -> list[int]:
        """Return how many ranks compute on each core."""
        counts = [0] * int(self.cores)
        for host in self.hosts:
            for rank in host.left:
                counts[self._place[rank]] += 1
        return counts

    def advance(self, now: float) -> None:
        """Let all hosts work until the time `now`."""
        passed = now - self.now
        if passed <= 0:
            return
        rates = self.rates
        for host in self.hosts:
            used = 0.0
            for rank in host.left:
                host.left[rank] -= passed * rates[rank].speed
                used += rates[rank].used
            if host.cores < 1:
                grown = host.allowance + passed * (host.cores - used)
                allowance = min(host.cores * _QUOTA_PERIOD, grown) if grown > _EPSILON else 0.0
                if (allowance > 0) != (host.allowance > 0):
                    self._rates = None
                host.allowance = allowance
        self.now = now


def cores_of(hosts: Sequence[Host], allowances: Sequence[float]) -> list[Cores]:
    """Return the hosts at the beginning of a step; hosts that name the same machine share its cores."""
    machines: dict[str, Machine] = {}
    made = []
    for number, (host, allowance) in enumerate(zip(hosts, allowances, strict=True)):
        if host.machine:
            machine = machines.setdefault(host.machine, Machine(number, max(1.0, host.machine_cores), host.contention))
        else:
            dedicated = len(host.ranks) == 1 and host.cores >= 1
            machine = Machine(number, max(1.0, host.cores), host.contention, dedicated)
        made.append(Cores(host.cores, machine, allowance))
        machine.hosts.append(made[-1])
    return made
