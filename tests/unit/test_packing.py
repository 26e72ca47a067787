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


def step(state: TrainState) -> None:
    parameters = dict(state._modules[0].named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    state.update(parameters, 0.1, 0)


def same(content: Tensor, state: TrainState) -> bool:
    found = load(content.numpy().tobytes())
    return found.keys() == state.tensors().keys() and all(torch.equal(found[k], v) for k, v in state.tensors().items())


def test_copies_are_safetensors_files_and_reuse_the_memory_that_they_are_given_until_the_state_changes_its_shape() -> (
    None
):
    model = build(ModelSpec(name="tests.models:normed"), 0, 10, InputSpec.of((1, 8, 8)))
    state, packer = TrainState(model, Adam(name="adam")), Packer()
    state.take([(0, len(model.chain))])
    step(state)
    first = packer.pack(state)
    assert same(first, state)
    step(state)
    assert same(packer.pack(state), state)
    assert not same(first, state)
    again = packer.pack(state, first)
    assert again.data_ptr() == first.data_ptr()
    assert same(again, state)
    state.take([(2, 5)])
    part = packer.pack(state, first)
    assert len(part) < len(first)
    assert same(part, state)
