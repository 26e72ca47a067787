"""Checks that a chain that is cut everywhere computes what the model computes, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from horizonml.engine.execution import backward
from horizonml.models.boundary import Layers, Values, flat, values_of


def loss_of(outputs: object) -> Tensor:
    """Return a number that depends on all outputs."""
    return torch.stack([value.square().mean() for value in flat(outputs) if value is not None]).sum()


def compare_with_model(original: nn.Module, chain: Layers, inputs: Values, names: Sequence[str] = ()) -> None:
    """Compare the outputs and all gradients, in evaluation mode: without dropout, and with fixed statistics.

    `names` are those of the inputs, if the model does not take them as its first arguments.
    """
    layers = [chain.slice(index, index + 1) for index in range(len(chain))]
    assert {key for layer in layers for key in layer.state_dict()} == set(original.state_dict())
    original.eval()
    for layer in layers:
        layer.eval()
    result = original(**dict(zip(names, inputs, strict=True))) if names else original(*inputs)
    expected = flat(result)
    loss_of(result).backward()
    gradients = {key: p.grad.clone() for key, p in original.named_parameters() if p.grad is not None}
    original.zero_grad()

    values, crossings = inputs, []
    for index, layer in enumerate(layers):
        boundary = chain.boundaries[index]
        assert [tuple(value.shape[1:]) for value in values] == [spec.shape for spec in boundary.tensors]
        assert [value.dtype for value in values] == [spec.dtype for spec in boundary.tensors]
        if index:  # as if they had come over the network
            values = boundary.leaves(tuple(value.detach().clone() for value in values), True)
        result = layer(*values)
        left = flat(result) if index + 1 == len(layers) else values_of(result)
        crossings.append((boundary, values, left))
        values = left
    for value, wanted in zip(values, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=0)
    backward((loss_of(values),), None)
    for index in reversed(range(len(layers) - 1)):
        after, entered, _ = crossings[index + 1]
        arrived = [value.grad for value in after.differentiable(entered)]
        pairs = zip(after.differentiable(crossings[index][2]), arrived, strict=True)
        wanted = [(value, gradient) for value, gradient in pairs if gradient is not None and value.requires_grad]
        if wanted:
            backward(tuple(value for value, _ in wanted), tuple(gradient for _, gradient in wanted))
    for key, parameter in original.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients.get(key), rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}"
        )
