"""Which layers can be split by channels, and which belong together."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from horizonml.engine.sync.channels import find_pairs
from horizonml.errors import ModelError
from horizonml.models.cutting import Chain
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.tasks.task import InputSpec


def pairs(name: str, shape: tuple[int, ...] = (3, 32, 32)) -> list[tuple[str, tuple[str, ...], str]]:
    model = build(ModelSpec(name=name), 0, 10, InputSpec.of(shape))
    return [(p.first, p.between, p.second) for p in find_pairs(model.chain.slice(0, len(model.chain)))]


def of(module: nn.Module, shape: tuple[int, ...]) -> list[tuple[str, tuple[str, ...], str]]:
    chain = Chain(module, InputSpec.of(shape))
    return [(p.first, p.between, p.second) for p in find_pairs(chain.slice(0, len(chain)))]


def test_the_two_convolutions_of_a_residual_block_are_a_pair() -> None:
    found = pairs("resnet18")
    assert ("layer1.0.conv1", ("layer1.0.bn1",), "layer1.0.conv2") in found
    assert len(found) == 8
    assert not any("downsample" in first or "downsample" in second for first, _, second in found)


def test_pairs_reach_over_pooling_and_flattening_and_depthwise_convolutions() -> None:
    assert pairs("tests.models:residual", (1, 8, 8))[-1] == ("1", (), "5")
    assert pairs("tests.models:depthwise", (1, 8, 8)) == [("0", ("2", "3"), "4")]


def test_linear_layers_pair_over_elementwise_functions_only() -> None:
    assert of(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), (4,)) == [("0", (), "2")]
    assert of(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)), (4,)) == []
    assert of(nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 4)), (4,)) == []


def test_a_layer_that_is_used_twice_is_in_no_pair() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(torch.relu(self.a(value))))

    assert of(Twice(), (4,)) == []


class OwnWeight(nn.Module):
    """Uses the weight of a layer that it also calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.layer(value), self.layer.weight.t())


def test_a_layer_that_cannot_be_split_is_named() -> None:
    circular = nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular")
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    for module, shape, problem in (
        (OwnWeight(), (4,), "layer layer, whose weight the forward also uses itself"),
        (nn.Sequential(computed), (4,), "whose weight is computed"),
        (nn.Sequential(nn.Conv2d(4, 8, 3, groups=2)), (4, 8, 8), "layer 0, a convolution in 2 groups"),
        (nn.Sequential(circular), (4, 8, 8), "layer 0, a convolution with padding_mode circular"),
        (nn.Sequential(nn.Linear(4, 4), nn.PReLU()), (4,), "layer 1, a PReLU; .* Choose ddp, pipeline"),
    ):
        with pytest.raises(ModelError, match=problem):
            of(module, shape)
