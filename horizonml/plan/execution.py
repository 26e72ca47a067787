"""Describes how each layer runs on a device: its memory format and its precision."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

PRECISIONS = ("fp32", "bf16")
MOST_LAYERS = 1 << 16


@dataclass(frozen=True)
class Execution:
    """Describes how one layer runs on one device."""

    channels_last: bool = False
    precision: str = "fp32"  # or "bf16": autocast, with float32 parameters and float32 sums of gradients

    @property
    def words(self) -> str:
        """Return a few words on how the layer runs."""
        found = [
            *(["channels_last"] if self.channels_last else []),
            *(["bf16"] if self.precision == "bf16" else []),
        ]
        return " and ".join(found) or "plain"


PLAIN = Execution()


class Run(NamedTuple):
    """Describes consecutive layers, `start` to `stop - 1`, that run in the same way."""

    start: int
    stop: int
    execution: Execution


@dataclass(frozen=True)
class Executions:
    """Describes how a rank runs the layers of the model, of which it may have a few or all."""

    layers: tuple[Execution, ...]
    channels_last_weights: frozenset[int] = frozenset()
    """The layers whose convolutions have their weights in the memory format channels_last, on all ranks alike."""

    @classmethod
    def of(cls, layers: Sequence[Execution]) -> Executions:
        """Return the executions of a rank if all ranks run the layers as it does."""
        return cls.among(layers, [layers])

    @classmethod
    def among(cls, own: Sequence[Execution], everyone: Collection[Sequence[Execution]]) -> Executions:
        """Return the executions of a rank among `everyone`, itself included.

        What members of a stage sum lies in memory as their weights do, so a layer's weights are channels_last only if
        all ranks run it so. Elsewhere a convolution in that format converts its weights each time.
        """
        last = (number for number in range(len(own)) if all(layers[number].channels_last for layers in everyone))
        return cls(tuple(own), frozenset(last))

    def runs(self, start: int, stop: int) -> list[Run]:
        """Return layers `start` to `stop - 1` as runs of layers that run in the same way."""
        return runs(self.layers, start, stop)

    @property
    def plain(self) -> bool:
        """Return whether all layers run as PyTorch runs them by default."""
        return all(layer == PLAIN for layer in self.layers)


def runs(layers: Sequence[Execution], start: int = 0, stop: int | None = None) -> list[Run]:
    """Return layers `start` to `stop - 1` as runs of layers that run in the same way."""
    numbers = range(start, len(layers) if stop is None else stop)
    found = []
    for execution, group in groupby(numbers, key=lambda number: layers[number]):
        own = list(group)
        found.append(Run(own[0], own[-1] + 1, execution))
    return found


def without_bf16(layers: Sequence[Execution]) -> tuple[Execution, ...]:
    """Return how layers run in float32 that may run in fewer bits."""
    return tuple(Execution(layer.channels_last, "fp32") for layer in layers)


def to_json(layers: Sequence[Execution]) -> list[Any]:
    """Return executions as JSON: for each run, the number of its layers, and how they run."""
    return [[stop - start, execution.channels_last, execution.precision] for start, stop, execution in runs(layers)]


def from_json(value: Any) -> tuple[Execution, ...]:
    """Return the executions from which `to_json` made `value`. Raises ValueError if it is anything else."""
    found: list[Execution] = []
    if not isinstance(value, list):
        raise ValueError("the executions of layers are not a list")
    for entry in value:
        if not isinstance(entry, list) or len(entry) not in (3, 4):  # 4: an earlier version could compile layers
            raise ValueError("a run of layers is not described by three values")
        layers, channels_last, precision = entry[:3]
        if type(layers) is not int or not 0 < layers <= MOST_LAYERS - len(found):
            raise ValueError(f"a run does not have from 1 to {MOST_LAYERS} layers")
        if type(channels_last) is not bool or precision not in PRECISIONS:
            raise ValueError("a run's memory format or precision is unknown")
        found += [Execution(channels_last, precision)] * layers
    return tuple(found)


def described(layers: Sequence[Execution], names: Sequence[str]) -> str:
    """Return in words which layers run how, such as `conv1 to layer4.1 in channels_last and bf16, the rest plain`."""
    found = [run for run in runs(layers) if run.execution != PLAIN]
    if not found:
        return "all layers plain"
    parts = []
    for start, stop, execution in found:
        span = names[start] if stop - start == 1 else f"{names[start]} to {names[stop - 1]}"
        parts.append(f"{span} in {execution.words}")
    rest = "" if sum(stop - start for start, stop, _ in found) == len(layers) else ", the rest plain"
    return f"{'; '.join(parts)}{rest}"
