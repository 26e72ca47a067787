"""Implements regression: predicting one or several numbers for each sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from horizonml.data.dataset import DataInfo
from horizonml.errors import JobError
from horizonml.tasks.task import BySample, OutputSpec, Tree, only_tensor

_LOSSES = {"mse": functional.mse_loss, "mae": functional.l1_loss, "huber": functional.smooth_l1_loss}


@dataclass(frozen=True)
class Regression(BySample):
    """Minimises the error of outputs `[batch, values]` against targets of the same shape, or of shape `[batch]`.

    The metrics are the mean absolute error, the root of the mean squared error, and the coefficient of determination
    R² over all values together.
    """

    kind: Literal["mse", "mae", "huber"] = "mse"

    metrics: ClassVar[tuple[str, ...]] = ("absolute", "squared", "target", "target_squared")

    def __post_init__(self) -> None:
        if self.kind not in _LOSSES:
            raise JobError(f"task.options.kind: {self.kind!r} is not one of {', '.join(_LOSSES)}")

    def loss(self, outputs: Tree, targets: Tree, training: bool) -> Tensor:
        """Return the sum over samples of the mean loss of their values."""
        values, truth = _alike(outputs, targets)
        return _LOSSES[self.kind](values, truth, reduction="none").mean(1).sum()

    def judge(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the sums over samples of each of the `metrics`, each a mean over values."""
        values, truth = (tensor.double() for tensor in _alike(outputs, targets))
        errors = values - truth
        return torch.stack([part.mean(1).sum() for part in (errors.abs(), errors.square(), truth, truth.square())])

    def report(self, loss: float, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the mean absolute error, the root mean squared error, and R²."""
        variance = metrics["target_squared"] - metrics["target"] ** 2
        r2 = 1 - metrics["squared"] / variance if variance > 0 else 0.0
        return {"mae": metrics["absolute"], "rmse": math.sqrt(max(0.0, metrics["squared"])), "r2": r2}

    def outputs(self, info: DataInfo) -> OutputSpec:
        """Return what the model must return for each sample: a number for each value of the target."""
        shape = info.target.shape if info.target is not None else ()
        count = info.outputs or math.prod(shape)
        return OutputSpec.vector(count)


def _alike(outputs: Tree, targets: Tree) -> tuple[Tensor, Tensor]:
    """Return predictions and truth as `[batch, values]`."""
    values, truth = only_tensor(outputs), only_tensor(targets).to(torch.float32)
    return values.reshape(len(values), -1), truth.reshape(len(truth), -1)
