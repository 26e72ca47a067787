"""Prepares a model for fine-tuning as its job says: from which weights it begins, and what of it is trained.

Adds low-rank adapters (LoRA; Hu et al., 2021) to a model with peft, and describes them in peft's format.

Each adapted layer becomes peft's layer of the same name, which holds the original one as `base_layer`.

Selects parameters and layers by globs on their names.

Freezes parameters: they get no gradients and no optimizer state, and BatchNorm keeps its statistics beside them.
"""

from __future__ import annotations

import importlib
import logging
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from horizonml.errors import ModelError
from horizonml.machine.code import require
from horizonml.machine.torchvision import import_torchvision
from horizonml.models.pretrained import Pretrained, is_adapter, plain_name, pretrained
from horizonml.models.spec import LoraSpec, ModelSpec
from horizonml.models.tracing import tried_out
from horizonml.text import nearest

_log = logging.getLogger(__name__)


def begin_from(spec: ModelSpec, model: nn.Module, ties: Sequence[Sequence[str]]) -> Pretrained | None:
    """Return the pretrained weights of a job, opened and matched to its model, or None. Raises ModelError."""
    return pretrained(spec.weights, spec.name, model, ties) if spec.weights is not None else None


def trained_note(model: nn.Module, ties: Sequence[Sequence[str]]) -> str:
    """Return, in words, how many of a model's parameters are trained; `ties` are names of one and the same."""
    again = {name for names in ties for name in names[1:]}
    counted = [parameter for name, parameter in model.named_parameters() if name not in again]
    trained = sum(parameter.numel() for parameter in counted if parameter.requires_grad)
    every = sum(parameter.numel() for parameter in counted)
    return f"{trained:,} of {every:,} parameters are trained, and the others are frozen"


def frozen_tensors(
    spec: ModelSpec, model: nn.Module, ties: Sequence[Sequence[str]], source: Pretrained | None
) -> frozenset[str]:
    """Freeze what a job does not train; return the tensors that training does not change. Raises ModelError."""
    names = [name for name, _ in model.named_parameters()]
    lora = spec.lora
    if lora is not None:
        check_trained(lora, names)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not is_frozen(lora, name))  # peft has frozen what is trained in full, too
        field, way_out = "model.lora", "add {} to model.lora.train"
        frozen = freeze(model, lambda name: is_frozen(lora, name), ties)
    elif spec.freeze:
        select(spec.freeze, names, "model.freeze", "parameter")
        field, way_out = "model.freeze", "exclude it with '!{}'"
        frozen = freeze(model, lambda name: selected(spec.freeze, name), ties)
    else:
        return frozenset()
    if source is None:
        _log.warning("%s freezes parameters at their random initial values, because model.weights is not set", field)
        return frozen
    anew = [name for name in names if name in frozen and name not in source.keys]
    if anew:
        layer = plain_name(anew[0]).rpartition(".")[0] or anew[0]
        raise ModelError(
            f"{field}: {plain_name(anew[0])} is frozen, but has no pretrained value, because the file lacks it or has "
            f"another shape; {way_out.format(layer)}"
        )
    return frozen


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


def selected(patterns: Sequence[str], name: str) -> bool:
    """Return whether the patterns select a name.

    A pattern also matches what lies beneath the module that it names. One that begins with `!` excludes names; later
    patterns override earlier ones. If all of them exclude, everything else is selected.
    """
    found = bool(patterns) and all(pattern.startswith("!") for pattern in patterns)
    for pattern in patterns:
        if _matches(pattern.removeprefix("!"), name):
            found = not pattern.startswith("!")
    return found


def select(patterns: Sequence[str], names: Iterable[str], field: str, what: str) -> list[str]:
    """Return the names that the patterns select; `field` is the job's field that has them, and `what` is selected.

    Raises ModelError for a pattern that matches none of the names, with the nearest one.
    """
    known = list(names)
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        if not any(_matches(bare, name) for name in known):
            raise ModelError(f"{field}: {pattern!r} matches no {what}{_nearest(bare, known)}")
    return [name for name in known if selected(patterns, name)]


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """Return the end of an error message that names what the pattern may have meant."""
    stem = pattern.rstrip("*").rstrip(".")
    parts = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
    return nearest(stem, sorted(parts)) or f"; the names are {', '.join(names[:3])}, ..."


Modes = Mapping[bool, Mapping[str, bool]]
"""For training and for evaluation of a model, which of its modules are then in training mode, by path."""


def freeze(model: nn.Module, is_frozen: Callable[[str], bool], ties: Sequence[Sequence[str]] = ()) -> frozenset[str]:
    """Freeze the parameters for which `is_frozen(name)` is true; return the tensors that training does not change.

    These are the parameters, and the running statistics of normalisations all of whose tensors are frozen. `ties` are
    names of parameters that are one and the same. Raises ModelError if nothing is left to train.
    """
    for names in ties:
        if len({is_frozen(name) for name in names}) > 1:
            raise ModelError(f"model.freeze: {' and '.join(names)} are one parameter; freeze both or neither")
    frozen = {name for name, _ in model.named_parameters() if is_frozen(name)}
    if frozen and frozen.issuperset(name for name, value in model.named_parameters() if value.requires_grad):
        raise ModelError("model.freeze: every parameter is frozen; exclude those to train, for example with '!fc.*'")
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    for path, module in model.named_modules():
        own = _own(path, module)
        if isinstance(module, _NormBase) and own and all(map(is_frozen, own)):
            keep_still(module)
            frozen.update(own)
    return frozenset(frozen)


def keep_still(norm: nn.Module) -> None:
    """Make a normalisation use its running statistics in training, too, and keep them as they are."""
    norm.eval()
    norm.train = types.MethodType(_stay, norm)  # type: ignore[method-assign]


def is_still(module: nn.Module) -> bool:
    """Return whether `keep_still` was called for a module or for the one that it is a copy of."""
    return getattr(module.__dict__.get("train"), "__func__", None) is _stay


def still_buffers(module: nn.Module) -> set[str]:
    """Return the names of the buffers within a module that are kept still."""
    return {name for path, inner in module.named_modules() if is_still(inner) for name in _own(path, inner)}


def _stay(norm: nn.Module, mode: bool = True) -> nn.Module:
    """Take the place of `train`: whatever mode is asked for, the module stays in that of evaluation."""
    return nn.Module.train(norm, False)


def _own(path: str, module: nn.Module) -> Iterable[str]:
    """Return the full names of a module's own tensors."""
    names = [
        name for registry in (module._parameters, module._buffers) for name, one in registry.items() if one is not None
    ]
    return [f"{path}.{name}" if path else name for name in names]


def modes_of(model: nn.Module) -> Modes | None:
    """Return the modes of a model's modules, if one of them has a `train` or `eval` of its own, or None.

    Authors override `train` to keep normalisations in evaluation mode, for example. A part of the model does not run
    the `train` of the modules around it, so it takes the modes over.
    """
    if all(type(one).train is nn.Module.train and type(one).eval is nn.Module.eval for one in model.modules()):
        return None
    found = {}
    for mode in (True, False):
        with tried_out(model):
            model.train(mode)
            found[mode] = {path: module.training for path, module in model.named_modules(remove_duplicate=False)}
    return found


def carry_modes(part: nn.Module, modes: Modes) -> None:
    """Make `train` of a part of a model put each of its modules into the mode that the model's own `train` does."""

    def train(module: nn.Module, mode: bool = True) -> nn.Module:
        type(module).train(module, mode)
        for path, inner in module.named_modules():
            inner.training = modes[mode].get(path, inner.training)
        root = module.__dict__.get("horizonml_root")  # of a slice, which shares its root's modules
        if isinstance(root, nn.Module):
            root.training = module.training
        return module

    part.train = types.MethodType(train, part)  # type: ignore[method-assign]
