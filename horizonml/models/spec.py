"""Defines the part of a job that says which model is trained, from which weights, and which of its parameters."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from horizonml.spec.base import Code, Spec, check_url, is_place_elsewhere
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

_OWN = "; name a class or function of your own as module:callable, such as my_model:build"

LIBRARIES = ("transformers", "timm")  # whose models are named LIBRARY:NAME, and built by what is installed
Pattern = Annotated[str, Field(min_length=1)]


class WeightsSpec(Spec):
    """Configures the pretrained weights that a model begins with; `weights: SOURCE` is short for `{source: SOURCE}`."""

    source: str = Field(
        min_length=1,
        description="Where the weights come from: the name of torchvision's weights for this model, such as "
        "IMAGENET1K_V1 or DEFAULT; an http(s) URL; a path; or `hub:ORG/NAME`, a model in this machine's Hugging Face "
        "cache. torchvision's weights and URLs are downloaded once per machine. A path is that of a safetensors file, "
        "of a state dict that torch.save wrote (only tensors are read from it, never code), or of a folder of "
        "*.safetensors, possibly with an index. All ranks need the same file, and each reads only its own layers.",
    )
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = Field(
        None,
        description="SHA-256 that the file must have (default: the one in its name, as in resnet18-f37072fd.pth). "
        "Required for a URL whose name contains no hash.",
    )
    base_url: str | None = Field(None, description="URL of a mirror that has torchvision's files under the same names.")
    strict: bool = Field(
        True,
        description="Refuse a file that lacks parameters of the model, or has additional ones. With false, missing "
        "parameters are newly initialised, and additional ones are ignored. A tensor whose shape differs, such as that "
        "of a head for other classes, is newly initialised in any case.",
    )

    @field_validator("source", "base_url")
    @classmethod
    def _places_are_plain(cls, value: str | None) -> str | None:
        if value is not None and (is_place_elsewhere(value) or value.startswith(("http:", "https:"))):
            check_url(value)
        return value

    @field_validator("base_url")
    @classmethod
    def _mirror_is_a_url(cls, value: str | None) -> str | None:
        if value is not None:
            check_url(value)
        return value


class LoraSpec(Spec):
    """Configures low-rank adapters (LoRA), made by peft; everything else is frozen, except for what `train` names."""

    rank: int = Field(8, ge=1, description="Rank of the adapters' matrices.")
    alpha: float = Field(16.0, gt=0, description="Scale of the adapters: their outputs are multiplied by alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout probability on the inputs of the adapters.")
    targets: list[Pattern] = Field(
        min_length=1,
        description="Globs on the names of the layers that get adapters, such as `layer[34].*` or `*.c_attn`; a glob "
        "that begins with ! excludes layers.",
    )
    train: list[Pattern] = Field(
        default_factory=list,
        description="Globs on the names of parameters that are trained in full beside the adapters, such as a new "
        "head: `fc.*`.",
    )


class ModelSpec(Spec):
    """Configures the neural network."""

    name: Annotated[str, Code(LIBRARIES)] = Field(
        "digits_cnn",
        description=f"One of {', '.join(MODELS)}; `transformers:CLASS`, a model of Hugging Face's transformers with "
        "new weights, such as transformers:GPT2LMHeadModel; `timm:NAME`, a model of timm with new weights; or "
        "`module:callable`, a subclass of torch.nn.Module or a function that is annotated to return one (`def build() "
        "-> torch.nn.Module`). A job file that names `module:callable` runs code, because the module is imported and "
        "called: run such job files only if you trust them.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments for the model's constructor, or for the configuration of a model of "
        "transformers. gpt takes layers (4), heads (4), width (128), dropout (0.0) and tied (true), which says whether "
        "the output layer shares the weights of the embedding. Its vocabulary size and its context length are those of "
        "the data.",
    )
    weights: WeightsSpec | None = Field(
        None, description="Pretrained weights to begin with (default: the constructor's own initial values)."
    )
    freeze: list[Pattern] = Field(
        default_factory=list,
        description="Globs on the names of parameters that are not trained, such as `layer[1-3].*`. A glob that begins "
        'with ! excludes parameters from that, and must be quoted in YAML: `["*", "!fc.*"]` trains only fc. Later '
        "globs override earlier ones.",
    )
    lora: LoraSpec | None = Field(None, description="Train low-rank adapters; needs `pip install 'horizonml[lora]'`.")

    @model_validator(mode="before")
    @classmethod
    def _short_weights(cls, values: Any) -> Any:
        """Take `weights: DEFAULT` for `weights: {source: DEFAULT}`."""
        if isinstance(values, dict) and isinstance(values.get("weights"), str):
            return {**values, "weights": {"source": values["weights"]}}
        return values

    @model_validator(mode="after")
    def _known(self) -> ModelSpec:
        if self.name not in MODELS and not re.fullmatch(r"[\w.]+:[\w.]+", self.name):
            raise ValueError(f"name: {self.name!r} is not a known model{nearest(self.name, MODELS) or _OWN}")
        return self

    @model_validator(mode="after")
    def _frozen_once(self) -> ModelSpec:
        if self.freeze and self.lora is not None:
            raise ValueError(
                "freeze: lora freezes everything but its adapters already; name what is trained in full in lora.train, "
                "and remove freeze"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """Return what shapes the model and its training; where its weights come from does not."""
        every = self.model_dump(exclude={"weights"})
        return {key: value for key, value in every.items() if value or key in ("name", "options")}
