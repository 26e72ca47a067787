"""Defines what is learned, as the engine and the models see it: an interface and plain data.

A task implements `Task` in a file of its own. The engine needs nothing else, and knows neither what samples are nor
what outputs mean. What a task of the user's own has and returns is checked, so that errors name the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from horizonml.data.dataset import Batch, DataInfo, Inputs, TensorSpec, Tree, detached
from horizonml.errors import DataError, JobError, ModelError

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
        advice = "Change the model, or set data.image_size to a size that it accepts."
        return InputSpec(info.inputs, info.names, advice if len(info.inputs[0].shape) == 3 else "")


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


_METHODS = ("loss", "judge", "units", "report", "input", "outputs")
_ADVICE = "; horizonml.tasks.task.Task describes the interface, and BySample beside it has most of it"

# What the engine reads from a task, in words, and whether a value is that.
_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "unit": ("a text such as 'samples'", lambda value: isinstance(value, str)),
    "units_per_sample": (
        "an integer from 1, or None if samples differ",
        lambda value: value is None or (type(value) is int and value > 0),
    ),
    "metrics": (
        "a tuple of texts, the names of what judge sums",
        lambda value: isinstance(value, tuple) and all(isinstance(one, str) for one in value),
    ),
}


class WrongClass(DataError):
    """A target is no class of the data; `row` is its place among the rows that a task was given."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


def check_classes(targets: Tensor, count: int, ignored: int | None = None) -> None:
    """Raise WrongClass if a target in the host's memory is neither a class, from 0 to `count - 1`, nor `ignored`.

    PyTorch's own loss takes -100 for a class to ignore, and says of others neither which sample nor which class.
    """
    if targets.device.type != "cpu" or not targets.numel():
        return
    wrong = (targets < 0) | (targets >= count)
    if ignored is not None:
        wrong &= targets != ignored
    if bool(wrong.any()):
        place = wrong.nonzero()[0]
        found = int(targets[tuple(place)])
        raise WrongClass(
            int(place[0]),
            f"has the class {found}, but classes are numbered from 0 to {count - 1}; correct the targets, or set "
            "data.classes and the model's number of outputs",
        )


def check_class(found: Any, name: str) -> None:
    """Raise JobError unless `found`, which a job calls `name`, is a class with the methods of a task."""
    if not isinstance(found, type):
        raise JobError(f"task.name: {name} is not a class{_ADVICE}")
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise JobError(f"task.name: {name} has no method {' and no method '.join(map(repr, missing))}{_ADVICE}")


def check_made(task: Any, name: str) -> None:
    """Raise JobError unless an instance of a task has the values that the engine reads from it."""
    for field, (wanted, valid) in _VALUES.items():
        if not hasattr(task, field):
            raise JobError(f"task.name: {name} has no {field!r}: {wanted}{_ADVICE}")
        if not valid(getattr(task, field)):
            raise JobError(f"task.name: {field!r} of {name} is {getattr(task, field)!r}, not {wanted}{_ADVICE}")


def check_results(task: Task, loss: Any, sums: Any, training: bool) -> None:
    """Raise JobError unless this is what the loss and the judge of a task must return."""
    name = type(task).__name__
    if not isinstance(loss, Tensor) or loss.dim():
        raise JobError(
            f"task: {name}.loss returned {_words(loss)}; return the sum over the units of the rows, a tensor without "
            "dimensions"
        )
    if training and not loss.requires_grad:
        raise JobError(
            f"task: the result of {name}.loss does not depend on the model's outputs, or was detached from them; "
            "nothing could be learned"
        )
    if not isinstance(sums, Tensor) or sums.shape != (len(task.metrics),) or sums.dtype != torch.float64:
        raise JobError(
            f"task: {name}.judge returned {_words(sums)}; return the sum of each of the {len(task.metrics)} metrics "
            f"({', '.join(task.metrics)}), a float64 tensor of shape [{len(task.metrics)}]"
        )


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
