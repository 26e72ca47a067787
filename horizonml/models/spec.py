"""Defines the part of a job that says which model is trained."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, model_validator

from horizonml.spec.base import Spec
from horizonml.text import nearest

TORCHVISION_MODELS = (
    "resnet18",
    "resnet50",
    "mobilenet_v3_small",
    "vgg11_bn",
    "efficientnet_b0",
    "densenet121",
    "convnext_tiny",
    "vit_b_16",
)
VISION_MODELS = ("digits_cnn", *TORCHVISION_MODELS)
MODELS = (*VISION_MODELS, "gpt")


class ModelSpec(Spec):
    """Configures the neural network."""

    name: str = Field(
        "digits_cnn",
        description=f"One of {', '.join(MODELS)}; `transformers:CLASS`, a model of Hugging Face's transformers with "
        "new weights, such as transformers:GPT2LMHeadModel; `timm:NAME`, a model of timm with new weights; or "
        "`module:callable`, a subclass of torch.nn.Module or a function that returns one (and says so: `def build() -> "
        "torch.nn.Module`). A job file that names `module:callable` is code, because that module is imported and "
        "called: run such job files only if you trust them.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments for the model's constructor, or for the configuration of a model of "
        "transformers. gpt takes layers (4), heads (4), width (128), dropout (0.0) and tied (true): whether the output "
        "uses the weights of the embedding. Its vocabulary and its context are those of the data.",
    )

    @model_validator(mode="after")
    def _known(self) -> ModelSpec:
        if self.name not in MODELS and not re.fullmatch(r"[\w.]+:[\w.]+", self.name):
            raise ValueError(f"name: {self.name!r} is not a known model{nearest(self.name, MODELS)}")
        return self
