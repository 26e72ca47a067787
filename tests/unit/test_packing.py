"""A state as bytes, which any reader of safetensors understands."""

from __future__ import annotations

import torch
from safetensors.torch import load
from torch import Tensor

from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.state.mirror import Packer
from horizonml.state.spec import Adam
from horizonml.state.train_state import TrainState
from horizonml.tasks.task import InputSpec


def trained() -> TrainState:
    model = build(ModelSpec(name="tests.models:normed"), 0, 10, InputSpec.of((1, 8, 8)))
    state = TrainState(model, Adam(name="adam"))
    (module,) = state.take([(0, len(model.chain))])
    step(state, module)
    return state


def step(state: TrainState, module: torch.nn.Module) -> None:
    parameters = dict(module.named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    state.update(parameters, 0.1, 0)


def same(content: Tensor, state: TrainState) -> bool:
    found = load(content.numpy().tobytes())
    return found.keys() == state.tensors().keys() and all(torch.equal(found[k], v) for k, v in state.tensors().items())


def test_copies_are_safetensors_files_and_reuse_the_memory_that_they_are_given() -> None:
    state, packer = trained(), Packer()
    first = packer.pack(state)
    assert same(first, state)
    step(state, state._modules[0])
    second = packer.pack(state)
    assert same(second, state)
    assert not same(first, state)
    again = packer.pack(state, first)
    assert again.data_ptr() == first.data_ptr()
    assert same(again, state)
    assert same(packer.pack(state, torch.zeros(len(first), dtype=torch.uint8)), state)


def test_a_state_that_has_changed_its_shape_is_laid_out_anew() -> None:
    state, packer = trained(), Packer()
    whole = packer.pack(state)
    state.take([(2, 5)])
    part = packer.pack(state, whole)
    assert len(part) < len(whole)
    assert same(part, state)
