"""Models how fast ranks compute over time when they share a quota, or when their containers share a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from horizonml.planner.hardware import Host

_EPSILON = 1e-12
_QUOTA_PERIOD = 0.1  # seconds; the default of Linux, Docker and Kubernetes


@dataclass
class Cores:
    """Models the cores that a host may use, its ranks that compute now, and the work that each has left.

    A host with less than one core has a quota: its container may use a whole core until its allowance is used up. The
    allowance grows continuously, but never beyond what one period of the quota grants.
    """

    number: int
    cores: float
    machine: Machine
    dedicated: bool  # to a single rank, which always computes at full speed
    allowance: float = 0.0  # seconds of a core
    left: dict[int, float] = field(default_factory=dict)  # seconds on a core of its own, by rank
    version: int = 0  # counts changes of speed, so that outdated forecasts can be recognised

    @property
    def wanted(self) -> float:
        """Return how many cores the host's ranks would use now."""
        if not self.left:
            return 0.0
        return min(len(self.left), 1.0 if self.cores < 1 and self.allowance > 0 else self.cores)

    @property
    def next_change(self) -> float:
        """Return the seconds until the first of the host's ranks finishes, or its allowance is used up."""
        used = self.wanted * self.machine.share
        soonest = min(self.left.values()) * len(self.left) / used
        if self.cores < 1 and self.allowance > 0 and used > self.cores:
            soonest = min(soonest, self.allowance / (used - self.cores))
        return soonest


@dataclass
class Machine:
    """Describes a physical machine and the hosts on it."""

    cores: float
    hosts: list[Cores] = field(default_factory=list)
    now: float = 0.0

    @property
    def share(self) -> float:
        """Return the fraction that the hosts get of the cores that they want."""
        wanted = sum(host.wanted for host in self.hosts)
        return min(1.0, self.cores / wanted) if wanted else 1.0

    def advance(self, now: float) -> None:
        """Let all hosts work until the time `now`."""
        passed, share = now - self.now, self.share
        for host, used in [(host, host.wanted * share) for host in self.hosts]:
            for rank in host.left:
                host.left[rank] -= passed * used / len(host.left)
            if host.cores < 1:
                grown = host.allowance + passed * (host.cores - used)
                host.allowance = min(host.cores * _QUOTA_PERIOD, grown) if grown > _EPSILON else 0.0
        self.now = now


def cores_of(hosts: Sequence[Host], allowances: Sequence[float]) -> list[Cores]:
    """Return the hosts at the beginning of a step; hosts that name the same machine share its cores."""
    machines: dict[str, Machine] = {}
    made = []
    for number, (host, allowance) in enumerate(zip(hosts, allowances, strict=True)):
        if host.machine:
            machine = machines.setdefault(host.machine, Machine(host.machine_cores))
        else:
            machine = Machine(max(1.0, host.cores))
        dedicated = not host.machine and len(host.ranks) == 1 and host.cores >= 1
        made.append(Cores(number, host.cores, machine, dedicated, allowance))
        machine.hosts.append(made[-1])
    return made
