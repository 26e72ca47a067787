"""Gradient truth for language models, and for models that are cut by their modules: as one process trains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.data.dataset import Inputs
from horizonml.data.seeds import name_seed
from horizonml.data.tensors import TensorSpec
from horizonml.models.spec import ModelSpec
from horizonml.models.structure import Structure
from horizonml.models.zoo import Model, build, construct
from horizonml.plan.plan import Sync
from horizonml.state.spec import Adam, Sgd
from horizonml.tasks.classification import Classification
from horizonml.tasks.language_model import LanguageModel
from horizonml.tasks.task import InputSpec, OutputSpec, Task
from tests.distributed.plans import ONE
from tests.distributed.pool import Pool
from tests.distributed.sessions import session_for, state_of
from tests.distributed.truth import Case, distance

WORDS, LENGTH, FULL, LR = 23, 10, 24, 0.1
SIZES = (24, 24, 13)  # the last batch of an epoch is smaller
TOKENS = TensorSpec((LENGTH,), torch.int64)
MASKED = InputSpec((TOKENS, TOKENS), ("input_ids", "attention_mask"))
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@dataclass(frozen=True)
class Kind:
    """A model, and what it learns."""

    name: str
    options: dict[str, Any]
    task: Task
    input: InputSpec
    outputs: OutputSpec
    tolerance: float = 1e-5

    def model(self) -> Model:
        """The model, with the same first values wherever it is made; every session has modules of its own from it."""
        if self.label not in _models:
            _models[self.label] = build(ModelSpec(name=self.name, options=self.options), 0, self.outputs, self.input)
        return _models[self.label]

    @property
    def label(self) -> str:
        """What tells it from others."""
        return f"{self.name} {self.options}"

    def whole(self) -> nn.Module:
        """The same as an ordinary module, which nothing has been traced or cut in."""
        made = construct(ModelSpec(name=self.name, options=self.options), 0, self.outputs, self.input)
        model = self.model()
        made.load_state_dict(model.stage(0, len(model.chain)).state_dict())
        return made.train()


_models: dict[str, Model] = {}


def language(name: str, **options: Any) -> Kind:
    return Kind(name, options, LanguageModel(LENGTH), InputSpec((TOKENS,)), OutputSpec(WORDS, (LENGTH, WORDS)))


_GPT = {"layers": 3, "heads": 2, "width": 16}
_GPT2 = {"n_layer": 3, "n_head": 2, "n_embd": 16, **_NO_DROPOUT}
_BERT = {
    "num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24,
    "vocab_size": WORDS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_DISTILBERT = {
    "n_layers": 3, "n_heads": 2, "dim": 16, "hidden_dim": 24, "vocab_size": WORDS, "dropout": 0.0,
    "attention_dropout": 0.0, "seq_classif_dropout": 0.0,
}  # fmt: skip


def image(name: str, tolerance: float = 1e-5) -> Kind:
    input, outputs = InputSpec.of((1, 8, 8)), OutputSpec(10, None if name.endswith(":Hidden") else (10,))
    return Kind(f"tests.{name}", {}, Classification(), input, outputs, tolerance)


KINDS = {
    "tied": language("gpt", **_GPT),
    "untied": language("gpt", **_GPT, tied=False),
    "gpt2": language("transformers:GPT2LMHeadModel", **_GPT2),
    "bert": Kind("transformers:BertForSequenceClassification", _BERT, Classification(), MASKED, OutputSpec.vector(5)),
    "u-net": image("models:StubbornUNet"),
    "hidden": image("opaque_models:Hidden"),
}
FEW = {  # whose rows are few
    "distilbert": Kind(
        "transformers:DistilBertForSequenceClassification", _DISTILBERT, Classification(), MASKED, OutputSpec.vector(5)
    ),
    "unlearned": image("opaque_models:Unlearned"),
    "detaching": image("opaque_models:Detaching"),
    "half precision": image("opaque_models:halved", 2e-2),
}


EVERY = KINDS | FEW


@dataclass(frozen=True)
class NoiseBatch:
    """Noise for a kind of model, the same wherever it is made."""

    kind: Kind
    step: int
    size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", SIZES[self.step % len(SIZES)])

    def _random(self, *words: Any) -> torch.Generator:
        return torch.Generator().manual_seed(name_seed(self.step, *words))

    def inputs(self, start: int, stop: int) -> Inputs:
        random = self._random("inputs")
        if self.kind.input.tensors[0].dtype.is_floating_point:
            return torch.randn(self.size, *self.kind.input.tensors[0].shape, generator=random)[start:stop]
        tokens = torch.randint(0, WORDS, (self.size, LENGTH), generator=random)
        lengths = torch.randint(3, LENGTH + 1, (self.size, 1), generator=random)
        mask = (torch.arange(LENGTH) < lengths).long()
        return (tokens[start:stop], mask[start:stop]) if self.kind.input.names else tokens[start:stop]

    def targets(self, start: int, stop: int) -> Tensor:
        shape = self.kind.outputs.shape or (self.kind.outputs.count,)
        count, size = shape[-1], (self.size, *shape[:-1])
        return torch.randint(0, count, size, generator=self._random("targets"))[start:stop]


_HYBRID = "hybrid 2x2, shares 3:1 and 1:2"
_SHAPES = {
    "ddp 2": (((1.0, 1.0),), 2),
    "pipeline 2": ((ONE, ONE), 4),
    "pipeline 3": ((ONE, ONE, ONE), 5),
    _HYBRID: (((3.0, 1.0), (1.0, 2.0)), 3),
}
CASES = [
    Case(f"{name}, {model}", *_SHAPES[name], model=model)
    for name, models in {
        "ddp 2": ("gpt2",),
        "pipeline 2": ("u-net",),
        "pipeline 3": ("tied", "gpt2", "bert", "hidden"),
        _HYBRID: ("tied", "untied", "gpt2", "u-net"),
    }.items()
    for model in models
]
CASES += [
    Case(f"pipeline 2, {schedule}, {model}", (ONE, ONE), 4, schedule, model)
    for schedule, model in (("interleaved", "tied"), ("zb-h1", "gpt2"))
]
CASES += [
    Case("pipeline 2, zb-h1, hidden", (ONE, ONE), 4, "zb-h1", "hidden"),
    Case("pipeline 3, distilbert", *_SHAPES["pipeline 3"], model="distilbert"),
    Case("hybrid 2x2, half precision", ((1.0, 1.0), (1.0, 1.0)), 2, model="half precision"),
    # The part without gradients must stay as it is, whatever the decay.
    Case("hybrid 2x2, unlearned", ((3.0, 1.0), (1.0, 1.0)), 2, model="unlearned"),
    Case("ddp 2, fp16 sums, unlearned", ((1.0, 1.0),), 2, model="unlearned", sync=Sync.FP16),
    Case("pipeline 2, zb-h1, detaching", (ONE, ONE), 3, "zb-h1", "detaching", Sgd(momentum=0.9, weight_decay=0)),
    Case("hybrid 1+2, adamw, tied", (ONE, (1.0, 1.0)), 2, model="tied", optimizer=Adam(name="adamw", weight_decay=0.1)),
]


def train(rank: int, world_size: int, store: Store, case: Case, steps: int = 3) -> tuple[dict[str, Tensor], list[Any]]:
    """What a rank holds after some steps, and what it reported."""
    kind = EVERY[case.model]
    model = kind.model()
    group = Group(store, rank, world_size, 30.0)
    session = session_for(case.plan(len(model.chain)), model, group, case.optimizer, FULL, kind.task)
    totals = [session.step(NoiseBatch(kind, step), LR / 10).totals for step in range(steps)]
    state = state_of(session)
    group.close()
    return state, totals


def reference(case: Case, steps: int = 3) -> tuple[dict[str, Tensor], list[float]]:
    """The same in one process with plain PyTorch, on whole batches, and the loss of every step."""
    kind = EVERY[case.model]
    whole = kind.whole()
    parameters = list(whole.parameters())
    if isinstance(case.optimizer, Sgd):
        given = case.optimizer
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            parameters, lr=LR / 10, momentum=given.momentum, weight_decay=given.weight_decay
        )
    else:
        optimizer = torch.optim.AdamW(parameters, lr=LR / 10, weight_decay=case.optimizer.weight_decay)
    losses = []
    for step in range(steps):
        batch = NoiseBatch(kind, step)
        inputs, targets = batch.inputs(0, batch.size), batch.targets(0, batch.size)
        optimizer.zero_grad()
        names = kind.input.names
        outputs = whole(**dict(zip(names, inputs, strict=True))) if names else whole(inputs)
        loss = kind.task.loss(outputs, targets, True) / kind.task.units(targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {f"model/{key}": value.detach() for key, value in whole.state_dict().items()}, losses


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parameters_after_three_steps_equal_those_of_one_process(pool: Pool, case: Case) -> None:
    expected, losses = reference(case)
    seen = set()
    for rank, (state, totals) in enumerate(pool.run(case.world_size, train, case)):
        tolerance = 1e-4 if case.sync is Sync.FP16 else EVERY[case.model].tolerance
        assert [one.loss for one in totals] == pytest.approx(losses, rel=tolerance), f"rank {rank}"
        assert all(one.unit == EVERY[case.model].task.unit for one in totals)
        for key, value in state.items():
            if key.startswith("model/"):
                seen.add(key)
                # The bias of an attention's keys has no effect: its gradient is the rounding error of zero.
                close = distance(value, expected[key]) < tolerance or float((value - expected[key]).norm()) < 1e-12
                assert close, f"rank {rank}, {key}"
    assert seen == set(expected)


def test_the_rows_above_cover_both_ways_of_cutting() -> None:
    kinds = {name: isinstance(kind.model().chain, Structure) for name, kind in KINDS.items()}
    assert kinds == {"tied": False, "untied": False, "gpt2": True, "bert": True, "u-net": True, "hidden": False}
