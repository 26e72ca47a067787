"""Machines and the network between ranks, as plans are made for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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


@dataclass(frozen=True)
class Network:
    """Between two ranks: latency in seconds, bandwidth in bytes per second.

    `access[r]` is the bandwidth of rank r's own link where that is less; `pairs[a, b]` is (latency, bandwidth) from a
    to b where it differs from all that.
    """

    latency: float
    bandwidth: float
    access: tuple[float, ...] = ()
    pairs: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    def between(self, one: int, other: int) -> tuple[float, float]:
        """Latency and bandwidth from one rank to another."""
        if (one, other) in self.pairs:
            return self.pairs[one, other]
        if not self.access:
            return self.latency, self.bandwidth
        return self.latency, min(self.bandwidth, self.access[one], self.access[other])
