"""Implements image classification: which of a number of classes an image belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from horizonml.data.dataset import DataInfo
from horizonml.models.spec import TORCHVISION_MODELS, ModelSpec
from horizonml.tasks.task import InputSpec, OutputSpec, Tree


@dataclass(frozen=True)
class ImageClassification:
    """Minimises the cross-entropy of logits `[batch, classes]` against labels, int64 `[batch]`; measures accuracy."""

    label_smoothing: float = 0.0

    unit: ClassVar[str] = "samples"
    units_per_sample: ClassVar[int] = 1
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)

    def loss(self, outputs: Tree, targets: Tree, training: bool) -> Tensor:
        """Return the sum of the images' cross-entropy; labels are smoothed in training only."""
        assert isinstance(outputs, Tensor)
        assert isinstance(targets, Tensor)
        smoothing = self.label_smoothing if training else 0.0  # smoothing serves training, not evaluation
        return functional.cross_entropy(outputs, targets, reduction="sum", label_smoothing=smoothing)

    def judge(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the number of images whose largest logit is that of their class."""
        assert isinstance(outputs, Tensor)
        assert isinstance(targets, Tensor)
        return (outputs.argmax(1) == targets).sum(dtype=torch.float64).reshape(1)

    def channels(self, model: ModelSpec) -> int | None:
        """Return the number of colour channels that a model expects, or None to use those of the data."""
        return 3 if model.name in TORCHVISION_MODELS else None

    def input(self, info: DataInfo) -> InputSpec:
        """Return the model's input: normalised float32 images."""
        return InputSpec(info.inputs, info.names, "Set data.image_size to a size the model accepts.")

    def outputs(self, info: DataInfo) -> OutputSpec:
        """Return what the model must return for each image: a logit for each class."""
        return OutputSpec.vector(info.outputs)

    def units(self, targets: Tree) -> int:
        """Return the number of images."""
        assert isinstance(targets, Tensor)
        return len(targets)

    def report(self, loss: float, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics as they are."""
        return dict(metrics)
