"""Cuts a model into layers: by its graph where `torch.fx` can record it, and else by the structure of its modules."""

from __future__ import annotations

from torch import nn

from horizonml.errors import ModelError
from horizonml.models.chain import Chain
from horizonml.models.structure import LISTS, Structure
from horizonml.models.tracing import Untraceable
from horizonml.tasks.task import InputSpec

Layers = Chain | Structure


def cut(model: nn.Module, input: InputSpec) -> tuple[Layers, str]:
    """Return a model's layers, and a sentence about what could not be cut, which may be empty. Raises ModelError.

    The structure of the modules is used for models that cannot be traced, and for those of which a larger part stays in
    one piece when they are, because a module with a list of modules inside cannot be traced.
    """
    try:
        chain = Chain(model, input)
    except Untraceable as untraceable:
        try:
            structure = Structure(model, input)
        except ModelError as error:
            raise ModelError(f"{untraceable} {error}") from error
        return structure, _note(model, structure)
    if not any(_has_list(module) for module in chain.whole_modules()):
        return chain, chain.report()
    try:
        structure = Structure(model, input)
    except ModelError as error:
        return chain, f"parts of {type(model).__name__} stay in one piece: {error}"
    if _largest(structure) < _largest(chain):
        return structure, _note(model, structure)
    return chain, chain.report()


def _note(model: nn.Module, structure: Structure) -> str:
    found = f"{type(model).__name__} cannot be traced and is cut by its modules into {len(structure)} layers"
    trouble = structure.report()
    return f"{found}; {trouble}" if trouble else found


def _has_list(module: nn.Module) -> bool:
    """Return whether a module has a list of modules with parameters inside, which could be cut."""
    lists = [part for part in module.modules() if isinstance(part, LISTS)]
    return any(sum(any(True for _ in entry.parameters()) for entry in part.children()) > 1 for part in lists)


def _largest(layers: Layers) -> int:
    """Return the number of parameters in the largest layer."""
    parts = [layers.slice(index, index + 1) for index in range(len(layers))]
    return max(sum(parameter.numel() for parameter in part.parameters()) for part in parts)
