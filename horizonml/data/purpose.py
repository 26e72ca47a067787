"""Tells what a data set is made for, by what it says itself or by what its samples look like."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horizonml.data.arrays import Arrays
from horizonml.data.spec import DataSpec
from horizonml.data.tensors import TensorSpec
from horizonml.errors import DataError

_WRAPPED = ("dataset", "data")  # attributes under which data sets such as torch's Subset keep the one that they wrap
_TASKS = ("classification", "multi_label", "regression", "segmentation", "language_model")


def task_of(dataset: Any, inputs: Sequence[TensorSpec], target: TensorSpec | None) -> str:
    """Return what the data is made for: what it says itself, or what its targets look like."""
    told = _attribute(dataset, ("task",))
    if isinstance(told, str) and told in _TASKS:
        return told
    if target is None or target.dtype.is_floating_point:
        return "regression"
    if not target.shape:
        return "classification"
    if len(target.shape) == 2 and len(inputs[0].shape) == 3:
        return "segmentation"
    if target.dtype == torch.int64 and inputs[0] == target:
        return "language_model"
    return "multi_label"


def outputs_of(spec: DataSpec, dataset: Any, title: str, task: str, target: TensorSpec | None) -> int:
    """Return how many classes, labels, words or values the model predicts. Raises DataError."""
    told = _attribute(dataset, ("outputs", "num_classes", "classes"))
    if told is not None:
        return int(told) if isinstance(told, int) else len(told)
    if spec.classes is not None:
        return spec.classes
    if target is None:
        return 0
    if task in ("regression", "multi_label"):
        return math.prod(target.shape)
    if task == "classification" and isinstance(dataset, Arrays):
        return dataset.count_classes()
    raise DataError(
        f"{title}: the targets are whole numbers, but of how many classes? Set data.classes, or give the data "
        "set an attribute `classes` (a list or a number)"
    )


def labels_of(dataset: Any, outputs: int) -> tuple[str, ...]:
    """Return the names of the classes, if the data set has an attribute `classes` with a name for each."""
    told = _attribute(dataset, ("classes",))
    names = list(told) if isinstance(told, Sequence | Mapping) and not isinstance(told, str) else []
    return tuple(map(str, names)) if len(names) == outputs else ()


def _attribute(dataset: Any, names: Sequence[str]) -> Any:
    """Return the first of these attributes that a data set has, or the one that it wraps."""
    for _ in range(10):
        for name in names:
            value = getattr(dataset, name, None)
            if isinstance(value, (int, str, Sequence, Mapping)) and not isinstance(value, bool):
                return value
        inner = next((getattr(dataset, name) for name in _WRAPPED if hasattr(dataset, name)), None)
        if inner is None or not hasattr(inner, "__getitem__"):
            return None
        dataset = inner
    return None
