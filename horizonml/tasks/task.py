"""Defines what is learned, as the engine and the models see it: an interface and plain data.

A task implements `Task` in a file of its own. The engine needs nothing else, and knows neither what samples are nor
what outputs mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from horizonml.data.dataset import Batch, Inputs, Tree, detached
from horizonml.data.tensors import TensorSpec

__all__ = ["Batch", "InputSpec", "Inputs", "OutputSpec", "Task", "Tree", "detached"]


@dataclass(frozen=True)
class InputSpec:
    """Describes the input of a model: one tensor, or several that are named like the arguments of its forward."""

    tensors: tuple[TensorSpec, ...]
    names: tuple[str, ...] = ()  # without names there is one tensor, the forward's first argument
    advice: str = ""  # a sentence about what to change in a job whose model does not accept this input

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype = torch.float32, advice: str = "") -> InputSpec:
        """Return the description of a single tensor."""
        return cls((TensorSpec(tuple(shape), dtype),), (), advice)


@dataclass(frozen=True)
class OutputSpec:
    """Describes what a model must return for each sample.

    `count` is handed to the model's constructor, as the number of classes, for example.
    """

    count: int
    shape: tuple[int, ...] | None = None  # of the tensor that the model returns; None if the task takes any

    @classmethod
    def vector(cls, count: int) -> OutputSpec:
        """Return the description of `count` values for each sample."""
        return cls(count, (count,))


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

    def loss(self, outputs: Tree, targets: Tree, training: bool) -> Tensor:
        """Return the sum of the loss over the units of these rows, a differentiable scalar.

        What only training uses, such as label smoothing, applies only where `training` is True.
        """

    def judge(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return each metric's sum over the units of these rows, float64 `[len(metrics)]`."""
