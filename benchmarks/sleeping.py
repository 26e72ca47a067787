"""A model whose layers take time but no processor, so that more ranks than cores still run at the same time."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class _Sleep(torch.autograd.Function):
    """Takes time, but no processor: forward, and for the gradient of what entered."""

    @staticmethod
    def forward(context: Any, value: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        time.sleep(seconds * len(value))
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.seconds * len(gradients[0]))
        return gradients[0], None


class _SleepForWeight(torch.autograd.Function):
    """Takes time for the gradient of a weight."""

    @staticmethod
    def forward(context: Any, weight: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.seconds)
        return gradients[0], None


class Sleeping(nn.Module):
    """A layer that sleeps `seconds` per sample forward, as long for its input's gradient, and for its weight's."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(1, 1))

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = _Sleep.apply(value, self.seconds)
        weight: Tensor = _SleepForWeight.apply(self.weight, self.seconds * len(value))
        return result + weight


def sleeping_model(layers: int, seconds: float, num_classes: int = 10) -> nn.Sequential:
    """Layers that take time but no processor: more ranks than cores then still run at the same time."""
    body = [Sleeping(seconds) for _ in range(layers - 1)]
    return nn.Sequential(*body, nn.Sequential(Sleeping(seconds), nn.Flatten(), Head(num_classes)))


class Head(nn.Module):
    """The first values of each sample as the logits."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, value: Tensor) -> Tensor:
        return value[:, : self.classes]
