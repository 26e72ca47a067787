"""Language models: the small GPT, those of transformers, and models that can only be cut by their modules."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horizonml.data.dataset import TensorSpec
from horizonml.errors import ModelError
from horizonml.models.boundary import values_of
from horizonml.models.cutting import cut
from horizonml.models.gpt import GPT
from horizonml.models.spec import ModelSpec
from horizonml.models.structure import Structure
from horizonml.models.weights import untie
from horizonml.models.zoo import build
from horizonml.profiling.measure import _operations, alike, measure
from horizonml.tasks.task import InputSpec, OutputSpec
from tests import models, opaque_models
from tests.chains import compare_with_model

WORDS, LENGTH = 31, 12
TOKENS = InputSpec((TensorSpec((LENGTH,), torch.int64),))
MASKED = InputSpec(
    (TensorSpec((LENGTH,), torch.int64), TensorSpec((LENGTH,), torch.int64)), ("input_ids", "attention_mask")
)
LOGITS = OutputSpec(WORDS, (LENGTH, WORDS))
SMALL: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_layer": 3, "n_head": 2, "n_embd": 16},
    "LlamaForCausalLM": {
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16,
        "intermediate_size": 24,
    },
    "BertForSequenceClassification": {
        "num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24,
        "vocab_size": WORDS,
    },
}  # fmt: skip


def tokens(rows: int = 3) -> Tensor:
    return torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def mask(rows: int = 3) -> Tensor:
    """The texts have different lengths."""
    return (torch.arange(LENGTH) < torch.tensor([[LENGTH - 4 * row] for row in range(rows)])).long()


def test_a_gpt_is_cut_at_every_block_and_computes_what_it_computed() -> None:
    torch.manual_seed(0)
    original = GPT(WORDS, LENGTH, layers=3, heads=2, width=16)
    assert original.head.weight is original.tokens.weight
    assert untie(original) == (("tokens.weight", "head.weight"),)
    chain, note = cut(original, TOKENS)
    assert not note
    starts = [min(n for n, name in enumerate(chain.names) if name.startswith(f"blocks.{block}")) for block in range(3)]
    for start in starts:  # a single tensor enters each block
        assert [spec.shape for spec in chain.boundaries[start].tensors] == [(LENGTH, 16)]
    compare_with_model(original, chain, (tokens(),))
    assert untie(GPT(WORDS, LENGTH, layers=1, heads=2, width=16, tied=False)) == ()


def test_a_gpt_with_bottlenecks_is_cut_within_them() -> None:
    torch.manual_seed(0)
    original = GPT(WORDS, LENGTH, layers=3, heads=2, width=16, bottleneck=4)
    untie(original)
    chain, _ = cut(original, TOKENS)
    crossing = [{(spec.shape, spec.dtype) for spec in boundary.tensors} for boundary in chain.boundaries[1:]]
    assert crossing.count({((LENGTH,), torch.uint8), ((LENGTH, 4), torch.float32)}) == 2
    compare_with_model(original, chain, (tokens(),))


def test_a_gpt_predicts_from_what_comes_before_and_takes_shorter_texts() -> None:
    torch.manual_seed(0)
    model = GPT(WORDS, LENGTH, layers=2, heads=2, width=16).eval()
    texts = tokens()
    changed = texts.clone()
    changed[:, 7] = (changed[:, 7] + 1) % WORDS
    before, after = model(texts), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])
    torch.testing.assert_close(model(texts[:, :5]), before[:, :5])


def test_a_gpt_begins_by_knowing_nothing() -> None:
    """Its first loss is that of guessing, and both uses of a tied weight begin with the same values."""
    model = build(ModelSpec(name="gpt", options={"layers": 2}), 0, LOGITS, TOKENS)
    stage = model.stage(0, len(model.chain))
    loss = torch.nn.functional.cross_entropy(stage(tokens()).detach().flatten(0, 1), tokens().flip(1).flatten())
    assert float(loss) == pytest.approx(math.log(WORDS), abs=0.2)
    values = dict(stage.named_parameters())
    assert torch.equal(values["tokens.weight"], values["head.weight"])
    assert float(values["blocks.0.down.weight"].detach().std()) == pytest.approx(0.01, rel=0.05)


def test_options_and_inputs_that_do_not_fit_a_gpt_are_refused() -> None:
    for options in ({"heads": 3}, {"layers": 0}, {"depth": 2}, {"bottleneck": 128}, {"bottleneck": -1}):
        with pytest.raises(ModelError, match="model gpt cannot be built with options"):
            build(ModelSpec(name="gpt", options=options), 0, LOGITS, TOKENS)
    with pytest.raises(ModelError, match=r"gpt takes sequences of tokens.*\[1, 8, 8\]"):
        build(ModelSpec(name="gpt"), 0, 10, InputSpec.of((1, 8, 8)))


def outputs_for(name: str) -> OutputSpec:
    return OutputSpec.vector(3) if name.startswith("Bert") else LOGITS


@pytest.mark.parametrize(("name", "input"), [("GPT2LMHeadModel", TOKENS), *((name, MASKED) for name in SMALL)])
def test_models_of_transformers_are_cut_at_every_block(name: str, input: InputSpec) -> None:
    spec = ModelSpec(name=f"transformers:{name}", options=SMALL[name])
    model = build(spec, 0, outputs_for(name), input)
    assert len(model.chain) >= 5
    assert "cannot be traced" in model.note
    for block in range(3):
        assert any(part.endswith((f"h.{block}", f"layers.{block}", f"layer.{block}")) for part in model.chain.names)
    whole = model.stage(0, len(model.chain))
    original = _original(name, input, whole)
    values = (tokens(), mask())[: len(input.tensors)]
    with torch.no_grad():  # made without memory, a piece at a time, and as the library makes it
        ours, theirs = whole.eval()(*values), original.eval()(**dict(zip(MASKED.names, values, strict=False)))
    torch.testing.assert_close(ours["logits"], theirs["logits"], rtol=0, atol=0)
    if input is MASKED:
        assert [len(boundary.tensors) for boundary in model.chain.boundaries[2:5]] == [2, 2, 2]  # the mask travels
    compare_with_model(original, cut(original, input)[0], values, input.names)


def _original(name: str, input: InputSpec, like: nn.Module) -> nn.Module:
    """The model as the library makes it, with parameters that are no longer tied, and the values of ours."""
    from horizonml.models.libraries import transformers_model

    function, options = transformers_model(name, outputs_for(name).count, input)
    original = function(**options | SMALL[name])
    untie(original)
    original.load_state_dict(like.state_dict())
    return original


def test_a_mask_changes_what_later_stages_compute() -> None:
    model = build(ModelSpec(name="transformers:GPT2LMHeadModel", options=SMALL["GPT2LMHeadModel"]), 0, LOGITS, MASKED)
    middle = len(model.chain) // 2
    first, second = (model.stage(*part).eval() for part in ((0, middle), (middle, len(model.chain))))
    whole = model.stage(0, len(model.chain)).eval()
    left = torch.flip(mask(), [1])  # texts that are filled up on the left
    for given in (mask(), left, torch.ones_like(left)):
        torch.testing.assert_close(
            second(*first(tokens(), given))["logits"], whole(tokens(), given)["logits"], rtol=0, atol=0
        )
    assert not torch.allclose(whole(tokens(), left)["logits"][:, -1], whole(tokens(), mask())["logits"][:, -1])


def test_what_transformers_does_not_have_is_refused() -> None:
    for name, options, problem in (
        ("GPT2LMHeadModl", {}, "did you mean 'GPT2LMHeadModel'"),
        ("GPT2LMHeadModel", {"n_layers": 3}, "GPT2Config has no option 'n_layers'; did you mean 'n_layer'"),
        ("pipeline", {}, "transformers has no model 'pipeline'"),
    ):
        with pytest.raises(ModelError, match=problem):
            build(ModelSpec(name=f"transformers:{name}", options=options), 0, LOGITS, TOKENS)


UNTRACEABLE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a U-Net": (models.StubbornUNet, 6),
    "a shared block": (lambda: models.Stubborn(shared=True), 2),
    "in place": (models.StubbornInPlace, 3),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_a_model_that_cannot_be_traced_is_cut_by_its_modules(name: str) -> None:
    constructor, layers = UNTRACEABLE[name]
    torch.manual_seed(0)
    original = constructor()
    chain, note = cut(original, InputSpec.of((1, 8, 8)))
    assert isinstance(chain, Structure)
    assert f"cut by its modules into {len(chain)} layers" in note
    assert len(chain) >= layers, chain.names
    compare_with_model(original, chain, (torch.randn(2, 1, 8, 8),))


@pytest.mark.parametrize("direct", [True, False])
def test_a_forward_whose_way_depends_on_the_data_is_noticed(direct: bool) -> None:
    chain, _ = cut(opaque_models.Wayward(direct=direct), InputSpec.of((1, 8, 8)))
    value = torch.randn(2, 1, 8, 8)
    entered = chain.slice(0, 2)(value)  # what the first layer returns, as zeros would have it
    with pytest.raises(ModelError, match=r"hands (what second returns|a tensor) to third that it did not use"):
        chain.slice(2, 4)(*values_of(entered))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AlbertForSequenceClassification", {**SMALL["BertForSequenceClassification"], "embedding_size": 8}),
        (
            "T5EncoderModel",
            {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
        ),
        ("MambaForCausalLM", {"num_hidden_layers": 2, "hidden_size": 16, "state_size": 4}),
    ],
)
def test_models_with_peculiar_configurations_and_constructors_are_built(name: str, options: dict[str, Any]) -> None:
    model = build(ModelSpec(name=f"transformers:{name}", options=options), 0, OutputSpec(WORDS, None), TOKENS)
    assert len(model.chain) > 3
    held = model.parameter_names
    assert all(tied in held for names in model.ties for tied in names)
    assert all(value.isfinite().all() for value in model.stage(0, len(model.chain)).parameters())


def test_slices_by_modules_hold_only_what_is_theirs_and_repeat() -> None:
    model = build(ModelSpec(name="tests.models:Stubborn"), 0, 10, InputSpec.of((1, 8, 8)))
    names = model.parameter_names
    assert sorted(set(names.values())) == [n for n in range(len(model.chain)) if n in set(names.values())]
    stages = [model.stage(n, n + 1) for n in range(len(model.chain))]
    held = [name for stage in stages for name, _ in stage.named_parameters()]
    assert len(held) == len(set(held))
    for mode in (True, False):
        for stage in stages:
            stage.train(mode)
            assert all(module.training == mode for module in stage.modules())
    values: tuple[Tensor, ...] = (torch.randn(4, 1, 8, 8),)
    whole = model.stage(0, len(model.chain)).eval()(*values)
    for stage in stages:
        values = values_of(stage.eval()(*values))
    torch.testing.assert_close(values[0], whole, rtol=0, atol=0)


def test_blocks_of_a_kind_are_given_the_same_time() -> None:
    """Otherwise a search for plans would put boundaries where measuring happened to be too low."""
    model = build(ModelSpec(name="gpt", options={"layers": 3, "heads": 2, "width": 16}), 0, LOGITS, TOKENS)
    layers = measure(model, (1, 4)).layers
    times = {layer.name: (layer.forward, layer.backward) for layer in layers}
    blocks = [names for name in times if (names := name.split(".")) and names[0] == "blocks"]
    attentions, networks = ([times[".".join(own)] for own in blocks if len(own) == size] for size in (2, 3))
    assert len(attentions) == len(networks) == 3
    assert len(set(attentions)) == len(set(networks)) == 1
    assert attentions[0] != networks[0]
    assert len({times[name] for name in ("tokens", "norm", "head")}) == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=4, dilation=4)),
        (nn.MaxPool2d(3, 1, 1), nn.MaxPool2d(9, 1, 4)),
        (nn.ReLU(), nn.Tanh()),
    ],
)
def test_layers_that_do_other_work_are_of_another_kind(one: nn.Module, other: nn.Module) -> None:
    value = torch.randn(2, 2, 16, 16, requires_grad=True)
    kinds = [_operations((module(value),)) for module in (one, copy.deepcopy(one), other)]
    assert kinds[0] == kinds[1] != kinds[2]


def test_the_time_of_a_kind_is_the_median_of_its_layers() -> None:
    one, other = ((1.0, 4.0), (2.0, 8.0)), ((3.0, 5.0), (2.0, 9.0))
    assert alike([one, other, one, ((7.0, 7.0), (7.0, 7.0))], ["a", "a", "b", "a"]) == [
        ((3.0, 5.0), (2.0, 8.0)),
        ((3.0, 5.0), (2.0, 8.0)),
        one,
        ((3.0, 5.0), (2.0, 8.0)),
    ]
