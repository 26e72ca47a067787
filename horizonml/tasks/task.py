"""Defines what is learned, as the engine and the models see it: an interface and plain data.

A task implements `Task` in a file of its own. The engine needs nothing else, and knows neither what samples are nor
what outputs mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from horizonml.data.dataset import Batch, DataInfo, Inputs, Tree, detached
from horizonml.data.tensors import TensorSpec
from horizonml.errors import DataError, ModelError

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

    `loss` and `judge` return sums, because a rank sees only some rows of a batch and the engine adds up the sums of all
    ranks. It divides them by the number of units in the global batch.
    """

    @property
    def unit(self) -> str:
        """Return what the loss is a mean over: "samples" or, for example, "tokens"."""

    @property
    def units_per_sample(self) -> int | None:
        """Return the number of units in each sample, which is 1 where the unit is the sample.

        Return None if samples differ, as padded texts do. Then the last stage reads the targets of the whole global
        batch to count their `units` before the backward pass.
        """

    def units(self, targets: Tree) -> int:
        """Return the number of units in these rows."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the names of the means that `judge` sums, such as "accuracy"."""

    def loss(self, outputs: Tree, targets: Tree, training: bool) -> Tensor:
        """Return the sum of the loss over the units of these rows, a differentiable scalar.

        What only training uses, such as label smoothing, applies only where `training` is True.
        """

    def judge(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return each metric's sum over the units of these rows, float64 `[len(metrics)]`."""

    def report(self, loss: float, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that are recorded, made from the mean loss and the mean of each of the `metrics`.

        A language model's perplexity, for example, is a function of its loss.
        """

    def input(self, info: DataInfo) -> InputSpec:
        """Return what the model takes, for data of this kind. Raises DataError if the task cannot use the data."""

    def outputs(self, info: DataInfo) -> OutputSpec:
        """Return what the model must return, for data of this kind."""


class BySample:
    """Implements what tasks have in common whose unit is the sample."""

    unit: ClassVar[str] = "samples"
    units_per_sample: ClassVar[int | None] = 1

    def units(self, targets: Tree) -> int:
        """Return the number of samples."""
        return rows_in(targets)

    def report(self, loss: float, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics as they are."""
        return dict(metrics)

    def input(self, info: DataInfo) -> InputSpec:
        """Return what the model takes."""
        advice = "Set data.image_size to a size the model accepts." if len(info.inputs[0].shape) == 3 else ""
        return InputSpec(info.inputs, info.names, advice)


def rows_in(tree: Tree) -> int:
    """Return the number of samples in a tree of tensors, each of which has them all. Raises DataError without any."""
    if isinstance(tree, Tensor):
        return len(tree)
    parts = list(tree.values()) if isinstance(tree, Mapping) else list(tree)
    if not parts:
        raise DataError("the targets have no tensor; give at least one")
    return rows_in(parts[0])


def only_tensor(tree: Tree) -> Tensor:
    """Return a tree that is a single tensor. Raises DataError if it is anything else."""
    if not isinstance(tree, Tensor):
        raise DataError(f"the task needs a single tensor where the data or the model has a {type(tree).__name__}")
    return tree


def main_tensor(tree: Tree, name: str) -> Tensor:
    """Return a model's output: a tensor, or the entry of that name in a mapping. Raises ModelError."""
    if isinstance(tree, Mapping):
        if name not in tree:
            raise ModelError(f"the model returns {', '.join(map(str, tree))}, but the task needs {name!r}")
        tree = tree[name]
    if not isinstance(tree, Tensor):
        raise ModelError(f"the model returns a {type(tree).__name__}, but the task needs a tensor")
    return tree
