"""Defines the profile of a device: the time and memory that each layer takes at several micro-batch sizes.

This module is plain data; `profiling.measure` makes profiles.

Describes the machines and the network between ranks, as the planner sees them.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from horizonml.plan.execution import from_json, to_json

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class LayerProfile:
    """Describes one layer; `forward[i]` and `backward[i]` are seconds for `Profile.sizes[i]` samples."""

    name: str
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    parameter_bytes: int
    saved_bytes: int  # kept from the forward to the backward pass, per sample
    output_bytes: int  # per sample
    trained_bytes: int | None = None  # of the parameters that are not frozen; None stands for all of them
    gradient_bytes: int | None = None  # of the output's gradient, per sample; None stands for as many as of the output
    coded: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The bytes per sample of the output and of its gradient in each format, scales included."""
    spread: float = 1.0
    """How many times as long as the quickest run the longest took, which other programs may have disturbed."""

    @property
    def trained(self) -> int:
        """Return the bytes of the parameters that are trained, which have gradients and optimizer state."""
        return self.parameter_bytes if self.trained_bytes is None else self.trained_bytes

    @property
    def gradients(self) -> int:
        """Return the bytes per sample that come back for the layer's output; 0 if nothing before a cut is trained."""
        return self.output_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def returns_gradients(self) -> bool:
        """Return whether a gradient comes back for the layer's output."""
        return self.gradient_bytes != 0


@dataclass(frozen=True)
class Profile:
    """Describes all layers of a model on one device."""

    device: str
    sizes: tuple[int, ...]
    update_seconds_per_byte: float
    layers: tuple[LayerProfile, ...]
    codec_seconds_per_byte: dict[str, float] = field(default_factory=dict)
    """The seconds to encode or decode a byte of float32 for a link, by format."""
    message_seconds: float = 0.0
    """The processor's seconds to send or receive a message; 0 if no link was measured."""
    transfer_seconds_per_byte: float = 0.0
    """The processor's seconds for each byte of a message."""
    crossing_seconds_per_byte: float = 0.0
    """The seconds of a core for each byte to or from another machine beyond those: its tunnel encrypts and carries."""
    least_rows: int = 1
    """The fewest samples to train on: 2 if a layer cannot train on one, as BatchNorm with one value per channel."""
    executions: tuple[Any, ...] = ()
    """How the layers ran when they were measured, as JSON of `plan.execution`; nothing stands for all plain."""
    gain: float = 1.0
    """How many times as fast as plain that is, all layers together, as far as that was measured."""

    def seconds(self, layer: int, rows: int) -> tuple[float, float]:
        """Return the forward and backward seconds of a layer for `rows` samples, interpolated between sizes."""
        found = self.layers[layer]
        return _interpolate(self.sizes, found.forward, rows), _interpolate(self.sizes, found.backward, rows)

    def scaled(self, factor: float) -> Profile:
        """Return the profile of a device that takes `factor` times as long for everything."""
        layers = tuple(
            replace(
                layer,
                forward=tuple(time * factor for time in layer.forward),
                backward=tuple(time * factor for time in layer.backward),
            )
            for layer in self.layers
        )
        return replace(
            self,
            update_seconds_per_byte=self.update_seconds_per_byte * factor,
            layers=layers,
            message_seconds=self.message_seconds * factor,
            transfer_seconds_per_byte=self.transfer_seconds_per_byte * factor,
            crossing_seconds_per_byte=self.crossing_seconds_per_byte * factor,
            codec_seconds_per_byte={name: time * factor for name, time in self.codec_seconds_per_byte.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the profile as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Profile:
        """Return the profile from which `to_json` made `value`."""
        layers = tuple(
            LayerProfile(
                **{
                    **layer,
                    "forward": tuple(layer["forward"]),
                    "backward": tuple(layer["backward"]),
                    "coded": {name: (int(out), int(back)) for name, (out, back) in layer.get("coded", {}).items()},
                }
            )
            for layer in value["layers"]
        )
        return cls(
            str(value["device"]),
            tuple(value["sizes"]),
            float(value["update_seconds_per_byte"]),
            layers,
            dict(value["codec_seconds_per_byte"]),
            float(value["message_seconds"]),
            float(value["transfer_seconds_per_byte"]),
            float(value.get("crossing_seconds_per_byte", 0.0)),
            int(value["least_rows"]),
            tuple(to_json(from_json(list(value.get("executions", ()))))),
            float(value.get("gain", 1.0)),
        )


def _interpolate(sizes: Sequence[int], times: Sequence[float], rows: int) -> float:
    """Return the seconds for `rows`, by piecewise linear interpolation.

    Beyond the largest size they are in proportion to it; below the smallest they follow the first piece.
    """
    if rows >= sizes[-1] or len(sizes) == 1:
        return times[-1] * rows / sizes[-1]
    upper = max(1, bisect.bisect_left(sizes, rows))
    low, high = sizes[upper - 1], sizes[upper]
    slope = (times[upper] - times[upper - 1]) / (high - low)
    return max(times[upper - 1] + slope * (rows - low), min(times) * rows / sizes[0] if rows < sizes[0] else 0.0)


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
