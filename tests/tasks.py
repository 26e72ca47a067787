"""Two tiny regression tasks: what can be learned besides the classes of images.

The first takes floats, and its loss is a mean over samples. The second takes integers, its targets are a mapping of
tensors, and its loss is a mean over values, of which each sample has two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from horizonml.data.dataset import DataInfo, Inputs, TensorSpec
from horizonml.data.sampler import name_seed
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import Model, build
from horizonml.tasks.task import BySample, InputSpec, OutputSpec, Task, Tree

OUTPUTS = 2
WORDS = 11  # that the embedding knows


def perceptron(num_outputs: int) -> nn.Sequential:
    """Takes floats `[b, 5]`."""
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, num_outputs))


def embedding(num_outputs: int) -> nn.Sequential:
    """Takes integers `[b, 6]`."""
    return nn.Sequential(nn.Embedding(WORDS, 4), nn.Flatten(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, num_outputs))


class _Plain(BySample):
    """What both tasks have in common."""

    def outputs(self, info: DataInfo) -> OutputSpec:
        """Return what the model returns."""
        return OutputSpec.vector(OUTPUTS)


@dataclass(frozen=True)
class Regression(_Plain):
    """The mean squared error of outputs `[batch, 2]` against float targets of the same shape."""

    metrics: ClassVar[tuple[str, ...]] = ("mean absolute error",)

    def loss(self, outputs: Tree, targets: Tree, training: bool) -> Tensor:
        """Return the sum over samples of the mean over both values."""
        assert isinstance(outputs, Tensor)
        assert isinstance(targets, Tensor)
        return (outputs - targets).square().mean(1).sum()

    def judge(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the sum over samples of the mean absolute error of both values."""
        assert isinstance(outputs, Tensor)
        assert isinstance(targets, Tensor)
        return (outputs - targets).abs().mean(1).sum(dtype=torch.float64).reshape(1)


@dataclass(frozen=True)
class WeightedRegression(_Plain):
    """The squared errors of all values, weighted by sample in training."""

    unit: ClassVar[str] = "values"
    units_per_sample: ClassVar[int | None] = OUTPUTS
    metrics: ClassVar[tuple[str, ...]] = ("mean absolute error", "accuracy")

    def units(self, targets: Tree) -> int:
        """Return the number of values."""
        return _parts(targets)[0].numel()

    def loss(self, outputs: Tree, targets: Tree, training: bool) -> Tensor:
        """Return the sum over values."""
        assert isinstance(outputs, Tensor)
        values, weights = _parts(targets)
        return ((outputs - values).square() * (weights[:, None] if training else 1)).sum()

    def judge(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the sum of absolute errors, and the number of values that are less than 0.5 away."""
        assert isinstance(outputs, Tensor)
        errors = (outputs - _parts(targets)[0]).abs().double()
        return torch.stack([errors.sum(), (errors < 0.5).sum()])


def _parts(targets: Tree) -> tuple[Tensor, Tensor]:
    assert isinstance(targets, Mapping)
    values, weights = targets["values"], targets["weights"]
    assert isinstance(values, Tensor)
    assert isinstance(weights, Tensor)
    return values, weights


@dataclass(frozen=True)
class Kind:
    """A task with a model for it."""

    task: Task
    model_name: str
    input: InputSpec

    def model(self) -> Model:
        """Return the model, with the same first values wherever it is made."""
        return build(ModelSpec(name=f"tests.tasks:{self.model_name}"), 0, OUTPUTS, self.input)

    @property
    def _tensor(self) -> TensorSpec:
        return self.input.tensors[0]

    def samples(self, count: int) -> Samples:
        """Return noise, the same wherever it is made."""
        generator = torch.Generator().manual_seed(name_seed(0, self.model_name, count))
        if self._tensor.dtype.is_floating_point:
            inputs = torch.randn(count, *self._tensor.shape, generator=generator)
        else:
            inputs = torch.randint(0, WORDS, (count, *self._tensor.shape), generator=generator)
        values, weights = torch.randn(count, OUTPUTS, generator=generator), torch.rand(count, generator=generator)
        return Samples(inputs, values if isinstance(self.task, Regression) else {"values": values, "weights": weights})


KINDS = {
    "floats": Kind(Regression(), "perceptron", InputSpec.of((5,))),
    "integers": Kind(WeightedRegression(), "embedding", InputSpec.of((6,), torch.int64)),
}


@dataclass(frozen=True)
class Samples:
    """Samples in memory: a split of a data set."""

    whole: Tensor
    truth: Tensor | Mapping[str, Tensor]

    def inputs(self, indices: Tensor) -> Tensor:
        """Return the inputs of these samples."""
        return self.whole[indices]

    def targets(self, indices: Tensor) -> Tree:
        """Return the targets of these samples."""
        if isinstance(self.truth, Tensor):
            return self.truth[indices]
        return {name: value[indices] for name, value in self.truth.items()}

    def augment(self, inputs: Inputs, batch: int, start: int, seed: int) -> Inputs:
        """Return the inputs as they are."""
        return inputs
