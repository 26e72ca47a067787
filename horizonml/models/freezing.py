"""Freezes parameters: they get no gradients and no optimizer state, and BatchNorm keeps its statistics beside them."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from horizonml.errors import ModelError


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
