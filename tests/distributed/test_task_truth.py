"""Models and tasks beside images and classes: they are trained as one process trains them, and judged as others judge.

Every built-in task and two tasks of the tests are here, language models, and models that are cut by their modules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizonml.data.dataset import DataBatch, Inputs, TensorSpec
from horizonml.data.sampler import name_seed
from horizonml.models.spec import ModelSpec
from horizonml.models.structure import Structure
from horizonml.models.zoo import Model, build, construct
from horizonml.plan.plan import Sync
from horizonml.state.spec import Adam, Sgd
from horizonml.tasks.classification import Classification
from horizonml.tasks.language_model import LanguageModel
from horizonml.tasks.task import InputSpec, OutputSpec, Task, Tree
from tests.builtin import BUILT_IN
from tests.distributed.plans import ONE, TWO
from tests.distributed.pool import Pool
from tests.distributed.truth import SIZES, Case, alone, expect_truth
from tests.tasks import KINDS, Samples

WORDS, LENGTH = 23, 10
TOKENS = TensorSpec((LENGTH,), torch.int64)
MASKED = InputSpec((TOKENS, TOKENS), ("input_ids", "attention_mask"))
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class Vectors:
    """A model that takes one tensor."""

    def call(self, module: nn.Module, inputs: Inputs) -> Any:
        return module(inputs)


@dataclass(frozen=True)
class BuiltInTask(Vectors):
    """A task of the package, with PyTorch's own loss and the metrics of torchmetrics."""

    name: str
    rate: float = 0.05

    @property
    def task(self) -> Task:
        return BUILT_IN[self.name].task

    def model(self) -> Model:
        return BUILT_IN[self.name].model()

    def batches(self) -> list[DataBatch]:
        return [DataBatch(BUILT_IN[self.name].samples(size), torch.arange(size)) for size in SIZES]

    def loss(self, outputs: Tensor, targets: Tree, training: bool) -> Tensor:
        assert isinstance(targets, Tensor)
        return BUILT_IN[self.name].loss(outputs, targets)

    def measure(self, outputs: Tensor, targets: Tree) -> dict[str, float]:
        assert isinstance(targets, Tensor)
        return BUILT_IN[self.name].measured(outputs.detach(), targets)


@dataclass(frozen=True)
class OwnTask(Vectors):
    """A task of the tests."""

    name: str
    rate: float = 0.05

    @property
    def task(self) -> Task:
        return KINDS[self.name].task

    def model(self) -> Model:
        return KINDS[self.name].model()

    def batches(self) -> list[DataBatch]:
        return [DataBatch(KINDS[self.name].samples(size), torch.arange(size)) for size in SIZES]

    def loss(self, outputs: Tensor, targets: Tree, training: bool) -> Tensor:
        return self.task.loss(outputs, targets, training) / self._units(outputs)

    def measure(self, outputs: Tensor, targets: Tree) -> dict[str, float]:
        means = self.task.judge(outputs.detach(), targets) / self._units(outputs)
        return dict(zip(self.task.metrics, means.tolist(), strict=True))

    def _units(self, outputs: Tensor) -> int:
        assert self.task.units_per_sample is not None
        return len(outputs) * self.task.units_per_sample


@dataclass(frozen=True)
class Family:
    """A model that is more than a chain of layers, and what it learns from noise."""

    name: str
    options: dict[str, Any]
    task: Task
    input: InputSpec
    outputs: OutputSpec
    rate: float = 0.01

    def model(self) -> Model:
        label = f"{self.name} {self.options}"
        if label not in _models:  # every session has modules of its own from it
            _models[label] = build(ModelSpec(name=self.name, options=self.options), 0, self.outputs, self.input)
        return _models[label]

    def whole(self) -> nn.Module:
        """The same as an ordinary module, which nothing has been traced or cut in."""
        made = construct(ModelSpec(name=self.name, options=self.options), 0, self.outputs, self.input)
        model = self.model()
        made.load_state_dict(model.stage(0, len(model.chain)).state_dict())
        return made.train()

    def batches(self) -> list[DataBatch]:
        return [DataBatch(self._samples(size), torch.arange(size)) for size in SIZES]

    def _samples(self, size: int) -> Samples | Masked:
        generator = torch.Generator().manual_seed(name_seed(size, "noise"))
        shape = self.outputs.shape or (self.outputs.count,)
        targets = torch.randint(0, shape[-1], (size, *shape[:-1]), generator=generator)
        spec = self.input.tensors[0]
        if spec.dtype.is_floating_point:
            return Samples(torch.randn(size, *spec.shape, generator=generator), targets)
        tokens = torch.randint(0, WORDS, (size, LENGTH), generator=generator)
        lengths = torch.randint(3, LENGTH + 1, (size, 1), generator=generator)
        samples = Masked if self.input.names else Samples
        return (
            samples(tokens, targets) if samples is Samples else Masked(tokens, targets, torch.arange(LENGTH) < lengths)
        )

    def call(self, module: nn.Module, inputs: Inputs) -> Any:
        names = self.input.names
        return module(**dict(zip(names, inputs, strict=True))) if names else module(inputs)

    def loss(self, outputs: Any, targets: Tree, training: bool) -> Tensor:
        return self.task.loss(outputs, targets, training) / self.task.units(targets)

    def measure(self, outputs: Any, targets: Tree) -> None:
        return None


@dataclass(frozen=True)
class Masked(Samples):
    """Samples of texts, and which of their words count."""

    mask: Tensor = field(default_factory=Tensor)

    def inputs(self, indices: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return the tokens and the masks of these samples."""
        return self.whole[indices], self.mask[indices].long()


_models: dict[str, Model] = {}


def language(name: str, **options: Any) -> Family:
    return Family(name, options, LanguageModel(LENGTH), InputSpec((TOKENS,)), OutputSpec(WORDS, (LENGTH, WORDS)))


def image(name: str) -> Family:
    outputs = OutputSpec(10, None if name.endswith(":Hidden") else (10,))
    return Family(f"tests.{name}", {}, Classification(), InputSpec.of((1, 8, 8)), outputs)


GPT = language("gpt", layers=3, heads=2, width=16)  # the first and the last layer share a parameter
NARROW = language("gpt", layers=3, heads=2, width=16, bottleneck=4)
GPT2 = language("transformers:GPT2LMHeadModel", n_layer=3, n_head=2, n_embd=16, **_NO_DROPOUT)
_BERT = {
    "num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24,
    "vocab_size": WORDS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
BERT = Family("transformers:BertForSequenceClassification", _BERT, Classification(), MASKED, OutputSpec.vector(5))
U_NET, HIDDEN = image("models:StubbornUNet"), image("opaque_models:Hidden")
UNLEARNED, DETACHING = image("opaque_models:Unlearned"), image("opaque_models:Detaching")
HYBRID = ((3.0, 1.0), (1.0, 2.0))
FAMILIES: list[tuple[Family, Case]] = [
    (GPT, Case("gpt, interleaved", (ONE, ONE), 4, "interleaved")),
    (GPT, Case("gpt, adamw", (ONE, TWO), 2, optimizer=Adam(name="adamw", weight_decay=0.1))),
    (NARROW, Case("gpt with bottlenecks, hybrid", (ONE, (1.0, 2.0), ONE), 3)),
    (GPT2, Case("gpt2, hybrid", (ONE, (1.0, 2.0)), 3)),
    (GPT2, Case("gpt2, zb-h1", (ONE, ONE), 4, "zb-h1")),
    (BERT, Case("bert, pipeline 3", (ONE, ONE, ONE), 5)),
    (U_NET, Case("u-net, hybrid", HYBRID, 3)),
    (HIDDEN, Case("hidden, zb-h1", (ONE, ONE), 4, "zb-h1")),
    (image("opaque_models:halved"), Case("half precision, hybrid", (TWO, TWO), 2)),
    # The part without gradients must stay as it is, whatever the decay.
    (UNLEARNED, Case("unlearned, hybrid", ((3.0, 1.0), TWO), 2)),
    (UNLEARNED, Case("unlearned, 16-bit sums", (TWO,), 2, sync=Sync.FP16)),
    (DETACHING, Case("detaching, zb-h1", (ONE, ONE), 3, "zb-h1", optimizer=Sgd(momentum=0.9, weight_decay=0))),
]
CUT_BY_MODULES = (GPT2, BERT, U_NET, UNLEARNED, DETACHING)  # the others are traced
TASKS: list[tuple[BuiltInTask | OwnTask, Case]] = [
    *((BuiltInTask(name), Case(f"{name}, hybrid", (TWO, (1.0, 2.0)), 3)) for name in BUILT_IN),
    (BuiltInTask("multi_label"), Case("multi_label, members that judge no rows", (ONE, (50.0, 1.0)), 2)),
    (BuiltInTask("language_model"), Case("language_model, zb-h1", (ONE, ONE, ONE), 3, "zb-h1")),
    (BuiltInTask("segmentation"), Case("segmentation, channels", (TWO,), 2, sync=Sync.CHANNELS)),
    (OwnTask("floats"), Case("floats, pipeline", (ONE, ONE, ONE), 4)),
    (OwnTask("integers"), Case("integers, hybrid", (TWO, (1.0, 2.0)), 3, "gpipe")),
]


@pytest.mark.parametrize(("family", "case"), FAMILIES, ids=[case.name for _, case in FAMILIES])
def test_a_family_of_models_is_trained_as_by_one_process(pool: Pool, family: Family, case: Case) -> None:
    assert isinstance(family.model().chain, Structure) == (family in CUT_BY_MODULES), "there are rows of both kinds"
    expected, judged = alone(family, family.whole(), case.optimizer)
    tolerance = 2e-2 if family.name.endswith("halved") else 1e-4 if case.sync is Sync.FP16 else 1e-5
    expect_truth(pool, case, family, expected, judged, tolerance=tolerance)


@pytest.mark.parametrize(("task", "case"), TASKS, ids=[case.name for _, case in TASKS])
def test_a_task_is_trained_and_judged_as_by_one_process(pool: Pool, task: BuiltInTask | OwnTask, case: Case) -> None:
    model = task.model()
    expected, judged = alone(task, model.stage(0, len(model.chain)).train(), case.optimizer)
    expect_truth(pool, case, task, expected, judged)
