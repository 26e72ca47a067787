"""Models that nobody tuned the cuts for: each is cut everywhere, and computes what it computed before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from horizonml.machine.torchvision import import_torchvision
from horizonml.models.chain import Chain
from horizonml.tasks.task import InputSpec
from tests import models
from tests.chains import compare_with_model


def classifier(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(import_torchvision().models, name)(num_classes=10, **options)


def segmentation(name: str) -> Callable[[], nn.Module]:
    found = import_torchvision().models.segmentation
    return lambda: getattr(found, name)(weights=None, weights_backbone=None, num_classes=5)


def maxvit() -> nn.Module:
    return import_torchvision().models.MaxVit(
        (32, 32), 8, 4, [8, 16], [1, 1], 4, stochastic_depth_prob=0.0, num_classes=10
    )


WITHOUT_AUX = {"aux_logits": False, "init_weights": False}
FAMILIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "regnet": (classifier("regnet_y_400mf"), (3, 32, 32), 18),
    "shufflenet": (classifier("shufflenet_v2_x0_5"), (3, 32, 32), 30),
    "swin": (classifier("swin_t"), (3, 64, 64), 20),
    "mnasnet": (classifier("mnasnet0_5"), (3, 32, 32), 40),
    "googlenet": (classifier("googlenet", **WITHOUT_AUX), (3, 64, 64), 20),
    "inception": (classifier("inception_v3", **WITHOUT_AUX), (3, 80, 80), 20),
    "squeezenet": (classifier("squeezenet1_1"), (3, 32, 32), 20),
    "maxvit": (maxvit, (3, 32, 32), 10),
    "efficientnet_v2": (classifier("efficientnet_v2_s"), (3, 32, 32), 40),
    "resnext": (classifier("resnext50_32x4d"), (3, 32, 32), 20),
    "vgg without BatchNorm": (classifier("vgg11"), (3, 32, 32), 16),
    "fcn": (segmentation("fcn_resnet50"), (3, 32, 32), 20),
    "deeplab": (segmentation("deeplabv3_mobilenet_v3_large"), (3, 32, 32), 40),
    "lraspp": (segmentation("lraspp_mobilenet_v3_large"), (3, 32, 32), 10),
    "a U-Net": (models.UNet, (1, 8, 8), 12),
    "two branches": (models.TwoBranches, (1, 8, 8), 8),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_cut_everywhere_computes_what_it_computed(name: str) -> None:
    constructor, shape, layers = FAMILIES[name]
    torch.manual_seed(0)
    original = constructor()
    chain = Chain(original, InputSpec.of(shape))
    assert len(chain) >= layers
    compare_with_model(original, chain, (torch.randn(2, *shape),))


def test_densenet_is_cut_inside_its_blocks_where_many_tensors_are_alive() -> None:
    chain = Chain(classifier("densenet121")(), InputSpec.of((3, 32, 32)))
    assert max(len(boundary.tensors) for boundary in chain.boundaries) > 10


def test_a_residual_network_is_cut_between_its_blocks_only() -> None:
    chain = Chain(classifier("resnet18")(), InputSpec.of((3, 32, 32)))
    assert {len(boundary.tensors) for boundary in chain.boundaries} == {1}
