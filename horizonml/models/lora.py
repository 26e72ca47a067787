"""Adds low-rank adapters (LoRA; Hu et al., 2021) to a model with peft, and describes them in peft's format.

Each adapted layer becomes peft's layer of the same name, which holds the original one as `base_layer`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from torch import nn

from horizonml.errors import ModelError
from horizonml.machine.extras import require
from horizonml.machine.torchvision import import_torchvision
from horizonml.models.patterns import select, selected
from horizonml.models.pretrained import is_adapter, plain_name
from horizonml.models.spec import LoraSpec

_ADAPTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


def import_peft() -> ModuleType:
    """Return peft, which is optional. Raises MissingPackage."""
    require("peft", "model.lora")
    import_torchvision()  # so that transformers, which peft needs, can import it beside a CPU build of torch
    return importlib.import_module("peft")


def with_adapters(build: Callable[[], nn.Module], spec: LoraSpec) -> Callable[[], nn.Module]:
    """Return a constructor of the same model with adapters. Raises MissingPackage."""
    # It is imported before the constructor runs, because initialisers are recorded in modules that are there by then.
    peft = import_peft()

    def build_with_adapters() -> nn.Module:
        model = build()
        # An attention layer of torch uses the weights of the layer inside it without calling that.
        bypassed = {f"{name}.out_proj" for name, one in model.named_modules() if isinstance(one, nn.MultiheadAttention)}
        layers = {
            f"{name}.weight": layer  # so that `fc` and `fc.*` both mean the layer fc
            for name, layer in model.named_modules()
            if name not in bypassed and (isinstance(layer, _ADAPTED) or _is_transposed(layer))
        }
        chosen = select(spec.targets, layers, "model.lora.targets", "layer that can have adapters")
        if not chosen:
            raise ModelError("model.lora.targets: every layer is excluded; name the layers that get adapters")
        targets = [name.removesuffix(".weight") for name in chosen]
        config = peft.LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            lora_dropout=spec.dropout,
            target_modules="|".join(map(re.escape, targets)),
            fan_in_fan_out=any(_is_transposed(layers[name]) for name in chosen),
        )
        try:
            adapted: nn.Module = peft.inject_adapter_in_model(config, model)
        except ValueError as error:  # for example, a rank that does not fit the groups of a convolution
            raise ModelError(f"model.lora: peft cannot add adapters: {error}") from error
        return adapted

    return build_with_adapters


def is_frozen(spec: LoraSpec, name: str) -> bool:
    """Return whether a tensor of a model with adapters is not trained."""
    return not is_adapter(name) and not selected(spec.train, plain_name(name))


def check_trained(spec: LoraSpec, names: Iterable[str]) -> None:
    """Raise ModelError if a pattern of `train` matches none of the tensors, or a layer that has adapters."""
    chosen = set(select(spec.train, map(plain_name, names), "model.lora.train", "parameter"))
    both = [name for name in names if plain_name(name) != name and plain_name(name) in chosen]
    if both:
        raise ModelError(
            f"model.lora.train: {plain_name(both[0])} belongs to a layer with adapters; take it out of train or out of "
            "targets"
        )


def adapter_config(spec: LoraSpec, names: Iterable[str]) -> Any:
    """Return peft's configuration of the adapters of a model whose tensors have these names."""
    every = list(names)
    targets = sorted({name.partition(".lora_")[0] for name in every if is_adapter(name)})
    modules = {name.rpartition(".")[0] for name in every}
    # peft takes a name for the end of names, too, so a list is right only if no other module's name ends like that.
    suffixes = tuple(f".{target}" for target in targets)
    ambiguous = any(module.endswith(suffixes) and module not in targets for module in modules)
    return import_peft().LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules="|".join(map(re.escape, targets)) if ambiguous else targets,
        modules_to_save=sorted(trained_modules(spec, every)) or None,
        inference_mode=True,
    )


def trained_modules(spec: LoraSpec, names: Iterable[str]) -> set[str]:
    """Return the modules with parameters that are trained in full."""
    return {name.rpartition(".")[0] for name in names if not is_adapter(name) and selected(spec.train, name)}


def exported_name(name: str) -> str:
    """Return the name that peft's files give to a tensor."""
    return f"base_model.model.{re.sub(r'[.]default(?=[.]|$)', '', name)}"


def _is_transposed(layer: nn.Module) -> bool:
    """Return whether this is transformers' own linear layer, whose weight is transposed."""
    return type(layer).__name__ == "Conv1D"
