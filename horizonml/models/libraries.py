"""Builds models of well-known libraries from their names and configurations, with new weights and without downloads.

The language models that jobs can name.

The convolutional models and the transformer that jobs can name: a small one of our own, and torchvision's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from horizonml.errors import ModelError
from horizonml.machine.code import require
from horizonml.machine.torchvision import import_torchvision
from horizonml.models.gpt import GPT
from horizonml.models.small import digits_cnn
from horizonml.spec.base import is_configuration
from horizonml.tasks.task import InputSpec
from horizonml.text import nearest

Constructor = tuple[Callable[..., nn.Module], dict[str, object]]

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_COUNT_PADDING = ("roberta", "camembert", "longformer", "mpnet", "ibert", "luke", "xmod", "data2vec-text")


def transformers_model(name: str, outputs: int, input: InputSpec) -> Constructor:
    """Return the constructor of a model of Hugging Face's transformers; its options are those of its configuration.

    The vocabulary of a language model and the number of positions are those of the data. Raises ModelError.
    """
    require("transformers", f"model transformers:{name}")
    import_torchvision()  # which transformers imports, too, and which needs help beside a CPU build of torch
    import transformers

    cls: Any = getattr(transformers, name, None)
    config: Any = getattr(cls, "config_class", None)
    if config is None or not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        known = [entry for entry in dir(transformers) if "For" in entry or entry.endswith("LMHeadModel")]
        raise ModelError(f"model.name: transformers has no model {name!r}{nearest(name, known)}")
    defaults: dict[str, object] = {"use_cache": False} if _has(config, "use_cache") else {}
    length = sequence_length(input)
    if name.endswith(("LMHeadModel", "ForCausalLM", "ForMaskedLM")):  # it predicts words
        # The tokens are the data's own: none of them begins, ends or fills up a text, unless the options say so.
        defaults |= {"vocab_size": outputs, **dict.fromkeys(_SPECIAL_TOKENS)}
        if _counts_padding(config):
            del defaults["pad_token_id"]
    else:
        defaults["num_labels"] = outputs
    if length is not None and _has(config, "max_position_embeddings"):
        first = _default(config).pad_token_id + 1 if _counts_padding(config) else 0
        defaults["max_position_embeddings"] = first + length
    return functools.partial(_from_config, cls, config), defaults


def timm_model(name: str, outputs: int, input: InputSpec) -> Constructor:
    """Return the constructor of a model of timm, and the keyword arguments that suit these outputs and this input.

    Raises ModelError.
    """
    require("timm", f"model timm:{name}")
    import_torchvision()
    import timm

    if not timm.is_model(name):
        raise ModelError(f"model.name: timm has no model {name!r}{nearest(name, timm.list_models())}")
    shape = input.tensors[0].shape
    channels = {"in_chans": shape[0]} if len(shape) == 3 else {}
    return functools.partial(timm.create_model, name, pretrained=False), {"num_classes": outputs, **channels}


# Options by which a library would read files, ask servers, or load code, none of which a job file's options may do.
_LEADS_ELSEWHERE = (
    "attn_implementation", "backbone", "cache_dir", "checkpoint_path", "experts_implementation",
    "kernel_config", "use_kernel", "name_or_path", "pretrained", "quantization", "auto_map", "trust_remote_code",
    "custom_pipelines",
)  # fmt: skip
_WEIGHTS = ("weights", "weights_backbone")  # by which torchvision's constructors download files
_ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ModelError for options of a library's model that name files, servers or code instead of a configuration.

    Weights have a field of their own, which reads tensors and never code.
    """
    for option, value in options.items():
        plain = option.strip("_").lower()
        if plain.startswith("attn_implementation") and value in _ATTENTION:
            continue
        named = any(word in plain for word in _LEADS_ELSEWHERE) or plain in _WEIGHTS
        if (named and value not in (None, False)) or not is_configuration({option: value}):
            raise ModelError(
                f"model.options: {option} would let {name} read files, ask servers or load code; leave it out, and "
                "name pretrained weights in model.weights"
            )
        for inner in _mappings(value):
            check_options(name, {str(key): one for key, one in inner.items()})


def _mappings(value: Any) -> Iterator[Mapping[Any, Any]]:
    """Yield the mappings in a value, also in lists, but not those within other mappings."""
    if isinstance(value, Mapping):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _mappings(inner)


LIBRARIES: dict[str, Callable[[str, int, InputSpec], Constructor]] = {
    "transformers": transformers_model,
    "timm": timm_model,
}


def _counts_padding(config: Any) -> bool:
    """Return whether models number their positions from the one after that of the padding token."""
    return any(name in config.model_type for name in _COUNT_PADDING)


def _from_config(cls: Any, config: Any, **options: Any) -> nn.Module:
    """Return a model with new weights. Raises ModelError for an option that the configuration does not have."""
    for option in options:
        if not _has(config, option):
            known = [name for name in vars(config()) if not name.startswith("_")]
            raise ModelError(f"model.options: {config.__name__} has no option {option!r}{nearest(option, known)}")
    model: nn.Module = cls(config(**options))
    return model


@functools.cache
def _default(config: Any) -> Any:
    return config()


def _has(config: Any, option: str) -> bool:
    """Return whether a configuration has an option, under this name or another one that stands for it."""
    return hasattr(_default(config), option)


def gpt_model(outputs: int, input: InputSpec) -> tuple[Callable[..., nn.Module], dict[str, object]]:
    """Return the constructor of the small GPT, and the keyword arguments that suit this vocabulary and this input.

    Raises ModelError unless the input is a sequence of tokens.
    """
    length = sequence_length(input)
    if length is None:
        raise ModelError(
            "model gpt takes sequences of tokens, int64 of shape [positions], but the data has inputs of shape "
            f"{' and '.join(str(list(tensor.shape)) for tensor in input.tensors)}; choose another model"
        )
    return GPT, {"vocabulary": outputs, "context": length}


def sequence_length(input: InputSpec) -> int | None:
    """Return the number of tokens in a sample, or None if the samples are no sequences of tokens."""
    shape, dtype = input.tensors[0].shape, input.tensors[0].dtype
    return shape[0] if len(shape) == 1 and not dtype.is_floating_point else None


def vision_model(name: str, outputs: int, input: InputSpec) -> tuple[Callable[..., nn.Module], dict[str, object]]:
    """Return a model's constructor and the keyword arguments that suit these outputs and this input.

    Raises ModelError unless the input has the shape `[channels, height, width]`.
    """
    (shape, *more) = (tensor.shape for tensor in input.tensors)
    if len(shape) != 3 or more:
        raise ModelError(
            f"model {name} takes inputs of shape [channels, height, width], but the data has inputs of shape "
            f"{list(shape)}; choose another model"
        )
    channels, height, _ = shape
    if name == "digits_cnn":
        return digits_cnn, {"num_classes": outputs, "channels": channels, "image_size": height}
    size = {"image_size": height} if name.startswith("vit") else {}
    return getattr(import_torchvision().models, name), {"num_classes": outputs, **size}
