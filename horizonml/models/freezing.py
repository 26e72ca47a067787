"""Freezes parameters: they get no gradients and no optimizer state, and BatchNorm keeps its statistics beside them."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from horizonml.errors import ModelError
from horizonml.models.tracing import tried_out

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
        if isinstance(root := module.__dict__.get("_root"), nn.Module):  # of a slice that shares its root's modules
            root.training = module.training
        return module

    part.train = types.MethodType(train, part)  # type: ignore[method-assign]
