"""Image classification."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from horizonml.tasks.task import Tree


class ImageClassification:
    """Cross-entropy and accuracy."""

    unit = "samples"
    units_per_sample = 1
    metrics: tuple[str, ...] = ("accuracy",)

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self._smoothing = label_smoothing

    def loss(self, outputs: Tensor, targets: Tree, training: bool) -> Tensor:
        """As in `Task`."""
        assert isinstance(targets, Tensor)
        smoothing = self._smoothing if training else 0.0
        loss: Tensor = functional.cross_entropy(outputs, targets, reduction="sum", label_smoothing=smoothing)
        return loss

    def judge(self, outputs: Tensor, targets: Tree) -> Tensor:
        """As in `Task`."""
        assert isinstance(targets, Tensor)
        return outputs.argmax(1).eq(targets).sum().to(torch.float64).reshape(1)
