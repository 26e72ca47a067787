"""Models that nobody tuned the cuts for: each is cut everywhere, and computes what it computed before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from horizonml.machine.torchvision import import_torchvision
from horizonml.models.chain import Chain
from horizonml.models.cutting import cut
from horizonml.models.libraries import timm_model
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.tasks.task import InputSpec, OutputSpec
from tests import models, opaque_models
from tests.chains import compare_with_model
from tests.programs import need_package


def classifier(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(import_torchvision().models, name)(num_classes=10, **options)


def segmentation(name: str) -> Callable[[], nn.Module]:
    found = import_torchvision().models.segmentation
    return lambda: getattr(found, name)(weights=None, weights_backbone=None, num_classes=5)


def maxvit() -> nn.Module:
    return import_torchvision().models.MaxVit(
        (32, 32), 8, 4, [8, 16], [1, 1], 4, stochastic_depth_prob=0.0, num_classes=10
    )


def small_swin() -> nn.Module:
    return import_torchvision().models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=10)


def small_efficientnet_v2() -> nn.Module:
    """All kinds of blocks of efficientnet_v2_s, one or two of each."""
    vision = import_torchvision().models.efficientnet
    fused, plain = vision.FusedMBConvConfig, vision.MBConvConfig
    blocks = [fused(1, 3, 1, 8, 8, 2), fused(4, 3, 2, 8, 16, 2), plain(4, 3, 2, 16, 24, 2), plain(6, 3, 1, 24, 32, 2)]
    return vision.EfficientNet(blocks, 0.2, num_classes=10, last_channel=64)


def small_vgg() -> nn.Module:
    """All of vgg11 but its classifier of 120 million parameters."""
    model = import_torchvision().models.vgg11()
    model.classifier[0], model.classifier[3], model.classifier[6] = (
        nn.Linear(25088, 16),
        nn.Linear(16, 16),
        nn.Linear(16, 10),
    )
    return model


WITHOUT_AUX = {"aux_logits": False, "init_weights": False}
FAMILIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "regnet": (classifier("regnet_y_400mf"), (3, 32, 32), 18),
    "shufflenet": (classifier("shufflenet_v2_x0_5"), (3, 32, 32), 30),
    "swin": (small_swin, (3, 64, 64), 8),
    "mnasnet": (classifier("mnasnet0_5"), (3, 32, 32), 40),
    "googlenet": (classifier("googlenet", **WITHOUT_AUX), (3, 64, 64), 20),
    "inception": (classifier("inception_v3", **WITHOUT_AUX), (3, 80, 80), 20),
    "squeezenet": (classifier("squeezenet1_1"), (3, 32, 32), 20),
    "maxvit": (maxvit, (3, 32, 32), 10),
    "efficientnet_v2": (small_efficientnet_v2, (3, 32, 32), 20),
    "resnext": (classifier("resnext50_32x4d"), (3, 32, 32), 20),
    "vgg without BatchNorm": (small_vgg, (3, 32, 32), 16),
    "fcn": (segmentation("fcn_resnet50"), (3, 32, 32), 20),
    "deeplab": (segmentation("deeplabv3_mobilenet_v3_large"), (3, 32, 32), 40),
    "lraspp": (segmentation("lraspp_mobilenet_v3_large"), (3, 32, 32), 10),
    "a U-Net": (models.UNet, (1, 8, 8), 12),
    "two branches": (models.TwoBranches, (1, 8, 8), 8),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "inception" else ()) for name in FAMILIES]
)
def test_a_model_cut_everywhere_computes_what_it_computed(name: str) -> None:
    constructor, shape, layers = FAMILIES[name]
    torch.manual_seed(0)
    original = constructor()
    chain = Chain(original, InputSpec.of(shape))
    assert len(chain) >= layers
    compare_with_model(original, chain, (torch.randn(2, *shape),))


@pytest.mark.parametrize(
    ("constructor", "layers"),
    [
        (opaque_models.Hidden, 8),
        (opaque_models.Unlearned, 4),
        (opaque_models.Detaching, 4),
        (models.StubbornInPlace, 4),
    ],
)
def test_what_a_graph_does_not_show_is_kept(constructor: Callable[[], nn.Module], layers: int) -> None:
    """Changes in place whose result is not used by a name of its own, views, and parts without gradients."""
    torch.manual_seed(0)
    original = constructor()
    chain, _ = cut(original, InputSpec.of((1, 8, 8)))
    assert len(chain) >= layers
    compare_with_model(original, chain, (torch.randn(3, 1, 8, 8),))


def test_a_model_of_timm_is_cut_everywhere() -> None:
    need_package("timm")
    spec = InputSpec.of((3, 32, 32))
    options: dict[str, dict[str, Any]] = {
        "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 24, "num_heads": 2},
        "convnext_atto": {"depths": [1, 1, 2, 1], "dims": [8, 12, 16, 20]},
    }
    for name, own in options.items():
        constructor, defaults = timm_model(name, 5, spec)
        torch.manual_seed(0)
        original = constructor(**defaults, **own)
        chain, _ = cut(original, spec)
        assert len(chain) >= 12
        compare_with_model(original, chain, (torch.randn(2, 3, 32, 32),))


@pytest.mark.parametrize("itself", [False, True], ids=["a module's", "the model's own"])
def test_buffers_change_as_often_as_the_forward_runs(itself: bool) -> None:
    original = opaque_models.Counting(itself=itself)
    chain, _ = cut(opaque_models.Counting(itself=itself), InputSpec.of((1, 8, 8)))
    whole = chain.slice(0, len(chain))
    whole.load_state_dict(original.state_dict())
    value = torch.randn(2, 1, 8, 8)
    for _ in range(3):
        torch.testing.assert_close(whole(value), original(value), rtol=0, atol=0)
    found = dict(whole.named_buffers())
    assert {name: float(buffer) for name, buffer in original.named_buffers()} == {
        name: float(buffer) for name, buffer in found.items()
    }


def test_no_cut_where_a_later_operation_changes_a_tensor_through_a_view() -> None:
    torch.manual_seed(0)
    chain, _ = cut(opaque_models.Hidden(), InputSpec.of((1, 8, 8)))
    layer = next(index for index, name in enumerate(chain.names) if name.startswith("third"))
    modules = {name.partition(".")[0] for name, _ in chain.slice(layer, layer + 1).named_parameters()}
    assert modules == {"third"}  # whose input and the view are made before, and changed after it
    assert [len(boundary.tensors) for boundary in chain.boundaries[layer : layer + 2]] == [1, 1]


def test_buffers_that_no_checkpoint_has_are_in_none() -> None:
    chain, _ = cut(opaque_models.Hidden(), InputSpec.of((1, 8, 8)))
    model = build(ModelSpec(name="tests.opaque_models:Hidden"), 0, OutputSpec(10, None), InputSpec.of((1, 8, 8)))
    for slice in (chain.slice(0, len(chain)), model.stage(0, len(model.chain))):
        assert "shift" in dict(slice.named_buffers())
        assert set(slice.state_dict()) == set(opaque_models.Hidden().state_dict())


def test_unused_parameters_are_named() -> None:
    class Unused(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Flatten(), nn.Linear(64, 8))
            self.aside = nn.Linear(8, 8, bias=False)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self[1](self[0](value))
            return found

    assert (
        cut(Unused(), InputSpec.of((1, 8, 8)))[1]
        == "its forward never uses aside.weight, which training does not change"
    )


def test_densenet_is_cut_inside_its_blocks_where_many_tensors_are_alive() -> None:
    chain = Chain(classifier("densenet121")(), InputSpec.of((3, 32, 32)))
    assert max(len(boundary.tensors) for boundary in chain.boundaries) > 10


def test_a_residual_network_is_cut_between_its_blocks_only() -> None:
    chain = Chain(classifier("resnet18")(), InputSpec.of((3, 32, 32)))
    assert {len(boundary.tensors) for boundary in chain.boundaries} == {1}
