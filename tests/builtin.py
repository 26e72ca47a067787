"""The tasks that come with the package: tiny models and samples for each, and what others compute of the same outputs.

The units of samples differ where a task allows it: texts are padded, and pixels are ignored.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from horizonml.data.sampler import name_seed
from horizonml.machine.torchvision import import_torchvision
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import Model, build
from horizonml.tasks.classification import Classification, MultiLabel
from horizonml.tasks.language_model import LanguageModel
from horizonml.tasks.regression import Regression
from horizonml.tasks.segmentation import Segmentation
from horizonml.tasks.task import InputSpec, OutputSpec, Task
from tests.tasks import Samples

CLASSES, WORDS, POSITIONS, SIDE, IGNORED = 4, 11, 7, 6, 255


def vectors(num_outputs: int) -> nn.Sequential:
    """Takes floats `[b, 5]`."""
    return nn.Sequential(
        nn.Linear(5, 16),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, num_outputs),
    )


def pixels(num_outputs: int) -> nn.Sequential:
    """Takes pictures `[b, 2, 6, 6]`, and returns logits for every pixel."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, num_outputs, 1)
    )


def words(num_outputs: int) -> nn.Sequential:
    """Takes tokens `[b, 7]`, and returns logits for every position."""
    return nn.Sequential(
        nn.Embedding(WORDS, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, num_outputs)
    )


@dataclass(frozen=True)
class BuiltIn:
    """A task with a model, targets for samples, the loss as PyTorch has it, and metrics as torchmetrics has them."""

    task: Task
    model_name: str
    input: InputSpec
    output: OutputSpec
    targets: Callable[[int, torch.Generator], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    metrics: Callable[[Any, Tensor, Tensor], dict[str, Any]]

    def model(self) -> Model:
        """Return the model, with the same first values wherever it is made."""
        return build(ModelSpec(name=f"tests.builtin:{self.model_name}"), 0, self.output, self.input)

    def samples(self, count: int) -> Samples:
        """Return noise, the same wherever it is made."""
        generator = torch.Generator().manual_seed(name_seed(0, self.model_name, count))
        (spec,) = self.input.tensors
        if spec.dtype.is_floating_point:
            inputs = torch.randn(count, *spec.shape, generator=generator)
        else:
            inputs = torch.randint(0, WORDS, (count, *spec.shape), generator=generator)
        return Samples(inputs, self.targets(count, generator))

    def measured(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return what torchmetrics finds."""
        import_torchvision()  # which torchmetrics imports without the precautions
        return {
            name: float(value)
            for name, value in self.metrics(importlib.import_module("torchmetrics"), outputs, targets).items()
        }


def padded(count: int, generator: torch.Generator) -> Tensor:
    """Tokens of texts of 0 to 7 words."""
    tokens = torch.randint(0, WORDS, (count, POSITIONS), generator=generator)
    lengths = torch.randint(0, POSITIONS + 1, (count, 1), generator=generator)
    return tokens.masked_fill(torch.arange(POSITIONS) >= lengths, -100)


def outlined(count: int, generator: torch.Generator) -> Tensor:
    """Classes of pixels, of which a share that differs by picture is ignored; the last class never occurs."""
    classes = torch.randint(0, CLASSES - 1, (count, SIDE, SIDE), generator=generator)
    shares = torch.rand(count, 1, 1, generator=generator)
    return classes.masked_fill(torch.rand(count, SIDE, SIDE, generator=generator) < shares, IGNORED)


def _classified(tm: Any, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    return {"accuracy": tm.functional.accuracy(outputs, targets, "multiclass", num_classes=CLASSES, average="micro")}


def _labelled(tm: Any, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    found, truth = outputs.sigmoid(), targets.int()
    return {
        "accuracy": tm.functional.accuracy(found, truth, "multilabel", num_labels=CLASSES, average="micro"),
        "exact_match": tm.functional.exact_match(found, truth, "multilabel", num_labels=CLASSES),
        "f1": tm.functional.f1_score(found, truth, "multilabel", num_labels=CLASSES, average="micro"),
    }


def _regressed(tm: Any, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    found, truth = outputs.double().flatten(), targets.double().flatten()
    return {
        "mae": tm.functional.mean_absolute_error(found, truth),
        "rmse": tm.functional.mean_squared_error(found, truth, squared=False),
        "r2": tm.functional.r2_score(found, truth),
    }


def _segmented(tm: Any, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    given = {"num_classes": CLASSES, "ignore_index": IGNORED}
    return {
        "accuracy": tm.functional.accuracy(outputs, targets, "multiclass", average="micro", **given),
        "mean_iou": tm.functional.jaccard_index(outputs, targets, "multiclass", average="macro", **given),
    }


def _continued(tm: Any, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    flat, truth = outputs.flatten(0, 1), targets.flatten()
    given = {"num_classes": WORDS, "ignore_index": -100, "average": "micro"}
    return {
        "accuracy": tm.functional.accuracy(flat, truth, "multiclass", **given),
        "perplexity": tm.functional.text.perplexity(outputs, targets, ignore_index=-100),
    }


BUILT_IN = {
    "classification": BuiltIn(
        Classification(),
        "vectors",
        InputSpec.of((5,)),
        OutputSpec.vector(CLASSES),
        lambda count, generator: torch.randint(0, CLASSES, (count,), generator=generator),
        functional.cross_entropy,
        _classified,
    ),
    "multi_label": BuiltIn(
        MultiLabel(),
        "vectors",
        InputSpec.of((5,)),
        OutputSpec.vector(CLASSES),
        lambda count, generator: (torch.rand(count, CLASSES, generator=generator) < 0.6).float(),
        functional.binary_cross_entropy_with_logits,
        _labelled,
    ),
    "regression": BuiltIn(
        Regression(),
        "vectors",
        InputSpec.of((5,)),
        OutputSpec.vector(3),
        lambda count, generator: torch.randn(count, 3, generator=generator) + 1,
        functional.mse_loss,
        _regressed,
    ),
    "segmentation": BuiltIn(
        Segmentation(CLASSES, IGNORED),
        "pixels",
        InputSpec.of((2, SIDE, SIDE)),
        OutputSpec(CLASSES, (CLASSES, SIDE, SIDE)),
        outlined,
        lambda outputs, targets: functional.cross_entropy(outputs, targets, ignore_index=IGNORED),
        _segmented,
    ),
    "language_model": BuiltIn(
        LanguageModel(POSITIONS, padded=True),
        "words",
        InputSpec.of((POSITIONS,), torch.int64),
        OutputSpec(WORDS, (POSITIONS, WORDS)),
        padded,
        lambda outputs, targets: functional.cross_entropy(outputs.flatten(0, 1), targets.flatten()),
        _continued,
    ),
}
