"""Defines what the planner knows of devices: profiles, machines, and the network between ranks.

A profile is the time and memory that each layer takes at several micro-batch sizes; `profiling.measure` makes profiles.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, PlainSerializer, TypeAdapter

from horizonml.plan.plan import PLAIN, Execution
from horizonml.text import printable

if TYPE_CHECKING:
    import numpy as np


# What values of files must be like; these types are checked where a file is read, and nowhere else.
Whole = Annotated[int, Field(ge=0, strict=True)]
Number = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
Name = Annotated[str, AfterValidator(lambda text: printable(text, 64))]
# Those of a profile, which people may write by hand.
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Bytes = Annotated[int, Field(ge=0)]
_Times = Annotated[
    tuple[_Seconds, ...], BeforeValidator(lambda value: list(value.values()) if isinstance(value, dict) else value)
]


def _also(name: str, other: str) -> Any:
    """Return that a field has another name in files for people."""
    return Field(validation_alias=AliasChoices(name, other), serialization_alias=other)


@dataclass(frozen=True)
class LayerProfile:
    """Describes one layer; `forward[i]` and `backward[i]` are seconds for `Profile.sizes[i]` samples.

    Layers that cannot train on one sample have the seconds for two in its place.
    """

    name: str
    forward: _Times
    backward: _Times
    parameter_bytes: _Bytes
    # Kept from the forward to the backward pass, per sample.
    saved_bytes: Annotated[_Bytes, _also("saved_bytes", "saved_bytes_per_sample")]
    output_bytes: Annotated[_Bytes, _also("output_bytes", "output_bytes_per_sample")]  # per sample
    trained_bytes: _Bytes | None = None  # of the parameters that are not frozen; None stands for all of them
    # Of the output's gradient, per sample; None stands for as many as of the output.
    gradient_bytes: Annotated[_Bytes | None, _also("gradient_bytes", "gradient_bytes_per_sample")] = None
    coded: Annotated[dict[str, tuple[_Bytes, _Bytes]], _also("coded", "coded_bytes")] = field(default_factory=dict)
    """The bytes per sample of the output and of its gradient in each format, scales included."""
    spread: _Seconds = 1.0
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
    sizes: tuple[_Bytes, ...]
    update_seconds_per_byte: _Seconds
    layers: tuple[LayerProfile, ...]
    codec_seconds_per_byte: dict[str, _Seconds] = field(default_factory=dict)
    """The seconds to encode or decode a byte of float32 for a link, by format."""
    message_seconds: _Seconds = 0.0
    """The processor's seconds to send or receive a message; 0 if no link was measured."""
    transfer_seconds_per_byte: _Seconds = 0.0
    """The processor's seconds for each byte of a message."""
    crossing_seconds_per_byte: _Seconds = 0.0
    """The seconds of a core for each byte to or from another machine beyond those: its tunnel encrypts and carries."""
    waiting_cores: _Seconds = 0.0
    """The part of a core that a rank uses whatever it does; only what has less than a core loses much by it."""
    least_rows: _Bytes = 1
    """The fewest samples to train on: 2 if a layer cannot train on one, as BatchNorm with one value per channel."""
    execution: Execution = PLAIN
    """How the layers ran when they were measured."""
    gain: _Seconds = 1.0
    """How many times as fast as plain that is, all layers together, as far as that was measured."""
    codec_seconds_per_message: dict[str, _Seconds] = field(default_factory=dict)
    """The seconds to encode or decode a message for a link, however short it is, by format."""

    def seconds(self, layer: int, rows: float) -> tuple[float, float]:
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
            codec_seconds_per_message={name: time * factor for name, time in self.codec_seconds_per_message.items()},
        )

    def to_json(self, for_people: bool = False) -> dict[str, Any]:
        """Return the profile as a JSON object; `for_people` with longer names, and without what is as usual."""
        return adapter(Profile).dump_python(self, mode="json", by_alias=for_people, exclude_defaults=for_people)  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, value: Any) -> Profile:
        """Return the profile from which `to_json` made `value`. Raises ValueError if nothing made it."""
        found: Profile = adapter(Profile).validate_python(value)
        for layer in found.layers:
            if not len(layer.forward) == len(layer.backward) == len(found.sizes):
                raise ValueError(f"layer {layer.name} was not measured at the sizes {list(found.sizes)}")
        if list(found.sizes) != sorted({*found.sizes}) or found.sizes[:1] < (1,):
            raise ValueError(f"sizes {list(found.sizes)} do not grow from 1 or more")
        return found


@functools.cache
def adapter(kind: type) -> TypeAdapter[Any]:
    """Return what turns a dataclass into JSON values and back; it takes a moment to make."""
    return TypeAdapter(kind)


def _interpolate(sizes: Sequence[int], times: Sequence[float], rows: float) -> float:
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
Contention = tuple[tuple[Positive, Positive], ...]


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

    ranks: tuple[Whole, ...]
    cores: Positive
    memory: Annotated[float, Field(strict=True, ge=float("-inf"))]  # endless, or negative if processes take too much
    machine: Name = ""
    machine_cores: Number = 0.0
    contention: Contention = ()  # among the ranks of the machine
    bursts: bool = True  # whether, with less than a core, it may use a whole one for a moment, as under a quota

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


class MeasuredLink(NamedTuple):
    """Describes the connection from one rank to another."""

    latency: float  # seconds
    bandwidth: float  # bytes per second

    def seconds(self, size: Size) -> Size:
        """Return the seconds that a message of `size` bytes takes."""
        return self.latency + size / self.bandwidth


# In files it is a list of `[a, b, latency, bandwidth]`.
_Pairs = Annotated[
    Mapping[tuple[Whole, Whole], tuple[Number, Positive]],
    BeforeValidator(lambda value: {(a, b): link for a, b, *link in value} if isinstance(value, list) else value),
    PlainSerializer(lambda pairs: [[*pair, *link] for pair, link in pairs.items()]),
]


@dataclass(frozen=True)
class Network:
    """Describes the links between all ranks: latency in seconds, bandwidth in bytes per second.

    `access[r]` is the bandwidth of rank r's own link where that is less; `pairs[a, b]` is (latency, bandwidth) from a
    to b where it differs from both.
    """

    latency: Number
    bandwidth: Positive
    access: tuple[Positive, ...] = ()
    pairs: _Pairs = field(default_factory=dict)

    def between(self, one: int, other: int) -> MeasuredLink:
        """Return the link from one rank to another."""
        if (one, other) in self.pairs:
            return MeasuredLink(*self.pairs[one, other])
        if not self.access:
            return MeasuredLink(self.latency, self.bandwidth)
        return MeasuredLink(self.latency, min(self.bandwidth, self.access[one], self.access[other]))

    def among(self, ranks: Sequence[int]) -> Network:
        """Return the network between some of the ranks, which are numbered anew in this order."""
        place = {rank: number for number, rank in enumerate(ranks)}
        pairs = {(place[a], place[b]): link for (a, b), link in self.pairs.items() if a in place and b in place}
        return Network(self.latency, self.bandwidth, tuple(self.access[rank] for rank in ranks if self.access), pairs)


LOCAL_NETWORK = Network(1e-4, 1e9)  # ranks of one machine
