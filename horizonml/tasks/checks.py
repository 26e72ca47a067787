"""Checks what a task of the user's own has and returns, so that a mistake is told by name and not by a traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from horizonml.errors import DataError, JobError
from horizonml.tasks.task import Task

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
