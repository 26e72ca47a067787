"""Implements language modelling: predicting the next token at every position of a sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from horizonml.data.dataset import DataInfo
from horizonml.errors import DataError
from horizonml.tasks.task import InputSpec, OutputSpec, Tree, check_classes, main_tensor, only_tensor

_IGNORED = -100  # cross-entropy's own convention


@dataclass(frozen=True)
class LanguageModel:
    """Minimises the cross-entropy of logits `[batch, positions, words]` against the next tokens `[batch, positions]`.

    With `padded`, positions whose target is -100 count nowhere. The metrics are the share of tokens that are predicted
    right, and the perplexity, `exp(loss)`. Models may return a mapping with the logits under `logits`.
    """

    positions: int
    padded: bool = False

    unit: ClassVar[str] = "tokens"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)

    @classmethod
    def of(cls, info: DataInfo, padded: bool = False) -> LanguageModel:
        """Return the task for a data set. Raises DataError if its targets are not sequences of tokens."""
        if info.target is None or len(info.target.shape) != 1:
            raise DataError("task: language_model needs targets of shape [positions], the next token at each position")
        return cls(info.target.shape[0], padded)

    @property
    def units_per_sample(self) -> int | None:
        """Return the number of tokens; None if samples are padded."""
        return None if self.padded else self.positions

    def units(self, targets: Tree) -> int:
        """Return the number of tokens that count."""
        tokens = only_tensor(targets)
        return int((tokens != _IGNORED).sum()) if self.padded else tokens.numel()

    def loss(self, outputs: Tree, targets: Tree, training: bool) -> Tensor:
        """Return the sum of the tokens' cross-entropy."""
        logits = main_tensor(outputs, "logits")
        tokens = only_tensor(targets).long()
        check_classes(tokens, logits.shape[-1], _IGNORED if self.padded else None)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum", ignore_index=_IGNORED)

    def judge(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the number of tokens that are predicted right."""
        hits = main_tensor(outputs, "logits").argmax(-1) == only_tensor(targets)
        return hits.sum(dtype=torch.float64).reshape(1)

    def report(self, loss: float, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the accuracy and the perplexity."""
        return {**metrics, "perplexity": math.exp(min(loss, 100.0))}

    def input(self, info: DataInfo) -> InputSpec:
        """Return what the model takes."""
        return InputSpec(info.inputs, info.names, "Set the length of the samples to one that the model accepts.")

    def outputs(self, info: DataInfo) -> OutputSpec:
        """Return what the model must return: a logit for each position and word of the vocabulary."""
        return OutputSpec(info.outputs, (self.positions, info.outputs))
