"""Implements classification: which one of a number of classes a sample belongs to, or which labels it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from horizonml.data.dataset import DataInfo
from horizonml.errors import JobError
from horizonml.tasks.task import BySample, OutputSpec, Tree, check_classes, main_tensor, only_tensor


@dataclass(frozen=True)
class Classification(BySample):
    """Minimises the cross-entropy of logits `[batch, classes]` against classes, int64 `[batch]`; measures accuracy."""

    label_smoothing: float = 0.0

    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)

    def loss(self, outputs: Tree, targets: Tree, training: bool) -> Tensor:
        """Return the sum of the samples' cross-entropy; labels are smoothed in training only."""
        logits, classes = main_tensor(outputs, "logits"), only_tensor(targets)
        check_classes(classes, logits.shape[1])
        smoothing = self.label_smoothing if training else 0.0  # smoothing serves training, not evaluation
        return functional.cross_entropy(logits, classes, reduction="sum", label_smoothing=smoothing)

    def judge(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the number of samples whose largest logit is that of their class."""
        hits = main_tensor(outputs, "logits").argmax(1) == only_tensor(targets)
        return hits.sum(dtype=torch.float64).reshape(1)

    def outputs(self, info: DataInfo) -> OutputSpec:
        """Return what the model must return for each sample: a logit for each class. Raises JobError."""
        target = info.target
        if target is not None and (target.dtype.is_floating_point or target.shape):
            raise JobError(
                "task.name: classification needs a class as the target of each sample, which is a whole number, but "
                f"the data has {target.dtype} of shape {list(target.shape)}; choose regression or multi_label"
            )
        return OutputSpec.vector(info.outputs)


@dataclass(frozen=True)
class MultiLabel(BySample):
    """Minimises the binary cross-entropy of logits `[batch, labels]` against targets of the same shape, from 0 to 1.

    The loss is the mean over labels. A label counts as predicted if its logit is above 0. The metrics are the share of
    labels that are right, the share of samples with all labels right, and the micro-averaged F1 score.
    """

    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "exact", "found", "predicted", "present")

    def loss(self, outputs: Tree, targets: Tree, training: bool) -> Tensor:
        """Return the sum of the samples' mean binary cross-entropy."""
        logits, labels = main_tensor(outputs, "logits"), only_tensor(targets).to(torch.float32)
        return functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1).sum()

    def judge(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the sums over samples of each of the `metrics`."""
        predicted, present = main_tensor(outputs, "logits") > 0, only_tensor(targets) > 0.5
        right = (predicted == present).to(torch.float64)
        counts = [(predicted & present).sum(), predicted.sum(), present.sum()]
        return torch.stack([right.mean(1).sum(), right.prod(1).sum(), *(count.double() for count in counts)])

    def report(self, loss: float, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics, with the F1 score in the place of its parts."""
        both = metrics["predicted"] + metrics["present"]
        f1 = 2 * metrics["found"] / both if both else 0.0
        return {"accuracy": metrics["accuracy"], "exact_match": metrics["exact"], "f1": f1}

    def outputs(self, info: DataInfo) -> OutputSpec:
        """Return what the model must return for each sample: a logit for each label."""
        return OutputSpec.vector(info.outputs)
