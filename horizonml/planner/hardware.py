"""Describes the machines and the network between ranks, as the planner sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np

Size = TypeVar("Size", float, "np.ndarray")  # bytes, one value or many


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

    @property
    def oversubscription(self) -> float:
        """Return the factor, at least 1, by which a rank computes longer while all ranks of the host compute."""
        return max(1.0, len(self.ranks) / self.cores)


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
