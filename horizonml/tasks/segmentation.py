"""Implements semantic segmentation: a class for every pixel of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from horizonml.data.dataset import DataInfo
from horizonml.errors import DataError
from horizonml.tasks.task import InputSpec, OutputSpec, Tree, check_classes, main_tensor, only_tensor


@dataclass(frozen=True)
class Segmentation:
    """Minimises the cross-entropy of logits `[batch, classes, height, width]` against classes `[batch, height, width]`.

    Pixels of the class `ignore` count nowhere. The metrics are the share of pixels that are right, and the mean over
    classes of the intersection over union. Models may return a mapping with the logits under `out`.
    """

    classes: int
    ignore: int | None = None
    pixels: int = 0  # of a target; needed if none are ignored

    unit: ClassVar[str] = "pixels"

    @classmethod
    def of(cls, info: DataInfo, ignore: int | None = None) -> Segmentation:
        """Return the task for a data set. Raises DataError if its targets are not pictures of classes."""
        if info.target is None or len(info.target.shape) != 2:
            raise DataError("task: segmentation needs targets of shape [height, width], a class for each pixel")
        height, width = info.target.shape
        return cls(info.outputs, ignore, height * width)

    @property
    def units_per_sample(self) -> int | None:
        """Return the number of pixels; None if some may be ignored."""
        return self.pixels if self.ignore is None else None

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the name of each sum: the pixels that are right, and each class's intersection and union."""
        parts = [f"{part}_{number}" for part in ("intersection", "union") for number in range(self.classes)]
        return ("accuracy", *parts)

    def units(self, targets: Tree) -> int:
        """Return the number of pixels that count."""
        classes = only_tensor(targets)
        return classes.numel() if self.ignore is None else int((classes != self.ignore).sum())

    def loss(self, outputs: Tree, targets: Tree, training: bool) -> Tensor:
        """Return the sum of the pixels' cross-entropy."""
        ignored = -100 if self.ignore is None else self.ignore
        logits, classes = main_tensor(outputs, "out"), only_tensor(targets).long()
        check_classes(classes, logits.shape[1], self.ignore)
        return functional.cross_entropy(logits, classes, reduction="sum", ignore_index=ignored)

    def judge(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the number of pixels that are right, and of each class's intersection and union."""
        truth = only_tensor(targets).long()
        found = main_tensor(outputs, "out").argmax(1)
        counted = torch.ones_like(truth, dtype=torch.bool) if self.ignore is None else truth != self.ignore
        truth, found = truth[counted], found[counted]
        right = truth[truth == found]
        intersection, ours, theirs = (torch.bincount(part, minlength=self.classes) for part in (right, found, truth))
        return torch.cat([right.new_tensor([len(right)]), intersection, ours + theirs - intersection]).double()

    def report(self, loss: float, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the pixel accuracy and the mean intersection over union of the classes that occur.

        A class that occurs nowhere, neither in truth nor in predictions, has none.
        """
        counted = [n for n in range(self.classes) if n != self.ignore]
        pairs = [(metrics[f"intersection_{n}"], metrics[f"union_{n}"]) for n in counted]
        ratios = [intersection / union for intersection, union in pairs if union > 0]
        return {"accuracy": metrics["accuracy"], "mean_iou": sum(ratios) / len(ratios) if ratios else 0.0}

    def input(self, info: DataInfo) -> InputSpec:
        """Return what the model takes."""
        return InputSpec(info.inputs, info.names, "Change the model, or set data.image_size to a size that it accepts.")

    def outputs(self, info: DataInfo) -> OutputSpec:
        """Return what the model must return: a logit for each class and pixel."""
        assert info.target is not None
        return OutputSpec(info.outputs, (info.outputs, *info.target.shape))
