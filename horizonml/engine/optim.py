"""The optimizer, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from horizonml.job import Adam as AdamSpec
from horizonml.job import LrSchedule, Sgd


def build_optimizer(spec: Sgd | AdamSpec, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """PyTorch's fused optimizer for these parameters; None if there are none (a stage of pooling layers)."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        return None
    if isinstance(spec, Sgd):
        return torch.optim.SGD(
            trainable,
            lr=spec.lr,
            momentum=spec.momentum,
            nesterov=spec.nesterov,
            weight_decay=spec.weight_decay,
            fused=True,
        )
    kind = torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam
    first, second = spec.betas
    return kind(trainable, lr=spec.lr, betas=(first, second), weight_decay=spec.weight_decay, fused=True)


def learning_rate(spec: LrSchedule, peak: float, step: int, steps_per_epoch: int, epochs: int) -> float:
    """The learning rate of a step, counted from 0 over the whole run."""
    if step < spec.warmup_steps:
        return peak * (step + 1) / spec.warmup_steps
    if spec.name == "constant":
        return peak
    if spec.name == "step":
        return peak * spec.factor ** (step // (spec.every_epochs * steps_per_epoch))
    last = max(1, steps_per_epoch * epochs - spec.warmup_steps)
    progress = min(1.0, (step - spec.warmup_steps) / last)
    shape = 1 - progress if spec.name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (spec.final + (1 - spec.final) * shape)
