"""Machines and the network between ranks, as plans are made for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np

Size = TypeVar("Size", float, "np.ndarray")  # bytes, of one thing or of many


@dataclass(frozen=True)
class Host:
    """A machine or a container: the ranks on it, its cores, and the memory that each of its ranks may use, in bytes.

    Containers with the same `machine` share its `machine_cores`; with none, a host is a machine of its own.
    """

    ranks: tuple[int, ...]
    cores: float
    memory: float
    machine: str = ""
    machine_cores: float = 0.0

    @property
    def oversubscription(self) -> float:
        """How many times as long a rank computes while all ranks of the host do, at least 1."""
        return max(1.0, len(self.ranks) / self.cores)


class Link(NamedTuple):
    """What connects two ranks, in one direction."""

    latency: float  # seconds
    bandwidth: float  # bytes per second

    def seconds(self, size: Size) -> Size:
        """Return how long a message of `size` bytes is on its way."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Network:
    """The links between all ranks: latency in seconds, bandwidth in bytes per second.

    `access[r]` is the bandwidth of rank r's own link where that is less; `pairs[a, b]` is (latency, bandwidth) from a
    to b where it differs from all that.
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
