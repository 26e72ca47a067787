"""What is learned: samples, the loss, and how predictions are judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

Tree = Tensor | Mapping[str, "Tree"] | Sequence["Tree"]


class Batch(Protocol):
    """A global batch, of which a rank reads only the rows it needs."""

    @property
    def size(self) -> int:
        """Samples in the global batch."""

    def inputs(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop - 1` of what enters the model; asked for by the first stage."""

    def targets(self, start: int, stop: int) -> Tree:
        """Of what outputs are judged against; asked for by the last stage."""


class Task(Protocol):
    """What is learned."""

    unit: str
    units_per_sample: int
    metrics: tuple[str, ...]

    def loss(self, outputs: Tensor, targets: Tree, training: bool) -> Tensor:
        """Sum over the units."""

    def judge(self, outputs: Tensor, targets: Tree) -> Tensor:
        """Sums over the units, float64 `[len(metrics)]`."""
