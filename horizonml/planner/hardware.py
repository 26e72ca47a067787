"""Describes the machines and the network between ranks, as the planner sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np

Size = TypeVar("Size", float, "np.ndarray")  # bytes, one value or many

# How much longer the same work takes a core while a number of cores compute on the machine, one point for each number
# that was measured, in order: (2.0, 1.06) says 6% longer while two compute. Empty if it was not measured.
Contention = tuple[tuple[float, float], ...]


def slowdown(contention: Contention, computing: float) -> float:
    """Return how many times as long work takes while so many cores compute, interpolated; 1 if that is not known."""
    before = (1.0, 1.0)
    for point in contention:
        if computing <= point[0]:
            part = (computing - before[0]) / (point[0] - before[0]) if point[0] > before[0] else 1.0
            return before[1] + max(0.0, part) * (point[1] - before[1])
        before = point
    return before[1]


@dataclass(frozen=True)
class Host:
    """Describes a machine or a container: its ranks, its cores, and the memory that each rank may use, in bytes.

    Containers with the same `machine` share its `machine_cores`; a host without `machine` is a machine by itself.
    """

    ranks: tuple[int, ...]
    cores: float
    memory: float
    machine: str = ""
    machine_cores: float = 0.0
    contention: Contention = ()  # among the ranks of the machine

    @property
    def oversubscription(self) -> float:
        """Return the factor, at least 1, by which a rank computes longer while all ranks of the host compute."""
        return max(1.0, len(self.ranks) / self.cores)

    @property
    def demand(self) -> float:
        """Return the part of a core that each rank uses while all of them compute, if it need not share that core."""
        return 1.0 if not self.machine and self.cores >= 1 else min(1.0, self.cores / len(self.ranks))

    @property
    def crowded(self) -> float:
        """Return how many times as long work takes a core while all ranks of the machine compute."""
        return self.contention[-1][1] if self.contention else 1.0


class Link(NamedTuple):
    """Describes the connection from one rank to another."""

    latency: float  # seconds
    bandwidth: float  # bytes per second

    def seconds(self, size: Size) -> Size:
        """Return the seconds that a message of `size` bytes takes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Network:
    """Describes the links between all ranks: latency in seconds, bandwidth in bytes per second.

    `access[r]` is the bandwidth of rank r's own link where that is less; `pairs[a, b]` is (latency, bandwidth) from a
    to b where it differs from both.
    """

    latency: float
    bandwidth: float
    access: tuple[float, ...] = ()
    pairs: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    def between(self, one: int, other: int) -> Link:
        """Return the link from one rank to another."""
        if (one, other) in self.pairs:
            return Link(*self.pairs[one, other])
        if not self.access:
            return Link(self.latency, self.bandwidth)
        return Link(self.latency, min(self.bandwidth, self.access[one], self.access[other]))

    def among(self, ranks: Sequence[int]) -> Network:
        """Return the network between some of the ranks, which are numbered anew in this order."""
        place = {rank: number for number, rank in enumerate(ranks)}
        pairs = {(place[a], place[b]): link for (a, b), link in self.pairs.items() if a in place and b in place}
        return Network(self.latency, self.bandwidth, tuple(self.access[rank] for rank in ranks if self.access), pairs)


LOCAL_NETWORK = Network(1e-4, 1e9)  # ranks of one machine
