"""Defines the profile of a device: the time and memory that each layer takes at several micro-batch sizes.

This module is plain data; `profiling.measure` makes profiles.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from horizonml.plan.execution import from_json, to_json


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
