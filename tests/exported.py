"""Models for tests of exports, named in jobs as `tests.exported:NAME`; all take `[b, 1, 8, 8]` but the last."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn


class _Scaled(nn.Module):
    """Multiplies by another number each time, which an exporter takes for a constant."""

    def forward(self, input: Tensor) -> Tensor:
        return input * (1 + random.random())


def restless() -> nn.Sequential:
    """A model whose exported graph cannot be what it computes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), _Scaled())


class Fixed(nn.Module):
    """Takes two samples at a time, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(input.reshape(2, 64))


class TwoInputs(nn.Module):
    """Takes words and a mask `[b, 6]`, and returns a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, words: Tensor, mask: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(words) * mask[..., None]
        pooled = hidden.sum(1) / mask.sum(1, keepdim=True)
        return {"logits": self.head(pooled), "pooled": torch.tanh(pooled)}
