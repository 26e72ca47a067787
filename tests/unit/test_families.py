"""Models that nobody tuned the cuts for: each is cut everywhere, and computes what it computed before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from horizonml.errors import ModelError
from horizonml.machine.torchvision import import_torchvision
from horizonml.models.cutting import Chain, cut
from horizonml.models.libraries import timm_model
from horizonml.models.small import digits_cnn
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.tasks.task import InputSpec, OutputSpec
from tests import models, opaque_models
from tests.chains import compare_with_model
from tests.programs import need_package


def classifier(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(import_torchvision().models, name)(num_classes=10, **options)


def small_resnet(num_classes: int = 10) -> nn.Module:
    vision = import_torchvision().models.resnet
    return vision.ResNet(vision.BasicBlock, [1, 1, 1, 1], num_classes=num_classes)


def small_resnext() -> nn.Module:
    vision = import_torchvision().models.resnet
    return vision.ResNet(vision.Bottleneck, [1, 1, 1, 1], num_classes=10, groups=4, width_per_group=4)


def small_densenet(num_classes: int = 10) -> nn.Module:
    return import_torchvision().models.DenseNet(12, (2, 3), 16, num_classes=num_classes)


def small_convnext() -> nn.Module:
    vision = import_torchvision().models.convnext
    blocks = [vision.CNBlockConfig(16, 24, 2), vision.CNBlockConfig(24, 32, 2), vision.CNBlockConfig(32, None, 1)]
    return vision.ConvNeXt(blocks, stochastic_depth_prob=0.1, num_classes=10)


def small_vit(num_classes: int = 10) -> nn.Module:
    return import_torchvision().models.VisionTransformer(32, 8, 2, 4, 48, 96, num_classes=num_classes)


def small_maxvit() -> nn.Module:
    return import_torchvision().models.MaxVit((32, 32), 8, 4, [8], [1], 4, stochastic_depth_prob=0.0, num_classes=10)


def small_swin() -> nn.Module:
    return import_torchvision().models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=10)


def small_efficientnet() -> nn.Module:
    """All kinds of blocks of efficientnet_v2_s, one or two of each."""
    vision = import_torchvision().models.efficientnet
    fused, plain = vision.FusedMBConvConfig, vision.MBConvConfig
    blocks = [fused(1, 3, 1, 8, 8, 2), fused(4, 3, 2, 8, 16, 2), plain(4, 3, 2, 16, 24, 2), plain(6, 3, 1, 24, 32, 2)]
    return vision.EfficientNet(blocks, 0.2, num_classes=10, last_channel=64)


def small_vgg() -> nn.Module:
    """Few convolutions, and a classifier without its 120 million parameters."""
    vision = import_torchvision().models.vgg
    model = vision.VGG(vision.make_layers([8, "M", 16, "M", 512, "M"], batch_norm=True), 10, init_weights=False)
    model.classifier[0], model.classifier[3] = nn.Linear(25088, 16), nn.Linear(16, 16)
    model.classifier[6] = nn.Linear(16, 10)
    return model


def segmentation() -> nn.Module:
    vision = import_torchvision().models.segmentation
    return vision.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5)


FAMILIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "digits_cnn": (digits_cnn, (1, 8, 8), 12),
    "resnet": (small_resnet, (3, 32, 32), 10),
    "resnext": (small_resnext, (3, 32, 32), 10),
    "mobilenet": (classifier("mobilenet_v3_small"), (3, 32, 32), 40),
    "vgg": (small_vgg, (3, 32, 32), 16),
    "efficientnet": (small_efficientnet, (3, 32, 32), 20),
    "densenet": (small_densenet, (3, 32, 32), 12),
    "convnext": (small_convnext, (3, 32, 32), 12),
    "vit": (small_vit, (3, 32, 32), 12),
    "shufflenet": (classifier("shufflenet_v2_x0_5"), (3, 32, 32), 30),
    "swin": (small_swin, (3, 64, 64), 8),
    "googlenet": (classifier("googlenet", aux_logits=False, init_weights=False), (3, 64, 64), 20),
    "maxvit": (small_maxvit, (3, 32, 32), 8),
    "segmentation": (segmentation, (3, 32, 32), 10),
    "a U-Net": (models.UNet, (1, 8, 8), 12),
    "two branches": (models.TwoBranches, (1, 8, 8), 8),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_cut_everywhere_computes_what_it_computed(name: str) -> None:
    """Outputs and gradients of all layers run one by one equal the original model's, and so do names and modes."""
    constructor, shape, layers = FAMILIES[name]
    torch.manual_seed(0)
    original = constructor()
    chain = Chain(original, InputSpec.of(shape))
    assert len(chain) >= layers
    compare_with_model(original, chain, (torch.randn(2, *shape),))
    stage = chain.slice(0, len(chain))
    for mode in (True, False):
        stage.train(mode)
        assert all(module.training == mode for module in stage.modules())


@pytest.mark.parametrize(
    ("constructor", "layers"),
    [
        (opaque_models.Hidden, 8),
        (opaque_models.Unlearned, 4),
        (opaque_models.Detaching, 4),
    ],
)
def test_what_a_graph_does_not_show_is_kept(constructor: Callable[[], nn.Module], layers: int) -> None:
    """Changes in place whose result is not used by a name of its own, views, and parts without gradients."""
    torch.manual_seed(0)
    original = constructor()
    chain, _ = cut(original, InputSpec.of((1, 8, 8)))
    assert len(chain) >= layers
    compare_with_model(original, chain, (torch.randn(3, 1, 8, 8),))


def test_models_of_timm_are_known_by_name_and_cut_everywhere() -> None:
    need_package("timm")
    spec = InputSpec.of((3, 32, 32))
    own = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 24, "num_heads": 2}
    constructor, defaults = timm_model("vit_tiny_patch16_224", 5, spec)
    torch.manual_seed(0)
    original = constructor(**defaults, **own)
    chain, _ = cut(original, spec)
    assert len(chain) >= 12
    compare_with_model(original, chain, (torch.randn(2, 3, 32, 32),))
    model = build(ModelSpec(name="timm:vit_tiny_patch16_224", options=own), 0, 5, spec)
    assert model.chain.boundaries[-1].tensors[0].shape == (5,)
    with pytest.raises(ModelError, match="timm has no model 'resnet10x'; did you mean"):
        build(ModelSpec(name="timm:resnet10x"), 0, 5, spec)


def test_buffers_change_as_often_as_the_forward_runs() -> None:
    """Those of a module, and the model's own."""
    for itself in (False, True):
        original = opaque_models.Counting(itself=itself)
        chain, _ = cut(opaque_models.Counting(itself=itself), InputSpec.of((1, 8, 8)))
        whole = chain.slice(0, len(chain))
        whole.load_state_dict(original.state_dict())
        value = torch.randn(2, 1, 8, 8)
        for _ in range(3):
            torch.testing.assert_close(whole(value), original(value), rtol=0, atol=0)
        found = {name: float(buffer) for name, buffer in whole.named_buffers()}
        assert found == {name: float(buffer) for name, buffer in original.named_buffers()}


def test_buffers_that_no_checkpoint_has_are_in_none() -> None:
    chain, _ = cut(opaque_models.Hidden(), InputSpec.of((1, 8, 8)))
    model = build(ModelSpec(name="tests.opaque_models:Hidden"), 0, OutputSpec(10, None), InputSpec.of((1, 8, 8)))
    for slice in (chain.slice(0, len(chain)), model.stage(0, len(model.chain))):
        assert "shift" in dict(slice.named_buffers())
        assert set(slice.state_dict()) == set(opaque_models.Hidden().state_dict())


def test_a_densenet_is_cut_inside_its_blocks_and_a_resnet_between_them_only() -> None:
    dense, residual = (Chain(made(), InputSpec.of((3, 32, 32))) for made in (small_densenet, small_resnet))
    assert max(len(boundary.tensors) for boundary in dense.boundaries) > 3
    assert {len(boundary.tensors) for boundary in residual.boundaries} == {1}
