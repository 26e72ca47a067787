"""Defines what is learned, as the engine and the models see it: an interface and plain data.

A task implements `Task` in a file of its own. The engine needs nothing else, and knows neither what samples are nor
what outputs mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from horizonml.data.dataset import Batch, Tree

__all__ = ["Batch", "InputSpec", "Task", "Tree"]


@dataclass(frozen=True)
class InputSpec:
    """Describes the input of a model: its shape without the batch dimension, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    advice: str = ""  # a sentence about what to change in a job whose model does not accept this input


class Task(Protocol):
    """Defines the objective of a training: its loss, and how predictions are judged.

    Both functions return sums, because a rank sees only some rows of a batch and the engine adds up the sums of all
    ranks. It divides them by the number of units in the global batch, `batch.size * units_per_sample`.
    """

    @property
    def unit(self) -> str:
        """Return what the loss is a mean over: "samples" or, for example, "tokens"."""

    @property
    def units_per_sample(self) -> int:
        """Return the number of units in each sample, which is 1 where the unit is the sample."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the names of the means that `judge` sums, such as "accuracy"."""

    def loss(self, outputs: Tensor, targets: Tree, training: bool) -> Tensor:
        """Return the sum of the loss over the units of these rows, a differentiable scalar.

        What only training uses, such as label smoothing, applies only where `training` is True.
        """

    def judge(self, outputs: Tensor, targets: Tree) -> Tensor:
        """Return each metric's sum over the units of these rows, float64 `[len(metrics)]`."""
