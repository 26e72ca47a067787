"""Cuts a model into layers: by its graph where `torch.fx` can record it, and else by the structure of its modules.

A model that can be cut in neither way is a single layer, which a rank trains whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from horizonml.errors import ModelError
from horizonml.models.chain import Chain
from horizonml.models.structure import LISTS, Structure
from horizonml.models.tracing import MadeLater, Untraceable
from horizonml.models.whole import Uncut
from horizonml.tasks.task import InputSpec

Layers = Chain | Structure | Uncut


@dataclass(frozen=True)
class Cutting:
    """Says how a model is cut into layers, so that all ranks cut it alike."""

    by: Literal["any", "graph", "modules", "nothing"] = "any"
    without: frozenset[int] = frozenset()  # calls of modules before which it is not cut; see `Structure`
    reason: str = ""  # why the model is not cut otherwise

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {"by": self.by, "without": sorted(self.without), "reason": self.reason}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Cutting:
        """Return what `to_json` was called on. Raises ValueError, TypeError or LookupError for anything else."""
        by = value["by"]
        if by not in ("any", "graph", "modules", "nothing"):
            raise ValueError(f"a model is not cut by {by!r}")
        return cls(by, frozenset(map(int, value["without"])), str(value["reason"]))


AUTOMATIC = Cutting()


def cut(model: nn.Module, input: InputSpec, cutting: Cutting = AUTOMATIC) -> tuple[Layers, str]:
    """Return a model's layers, and a sentence about what could not be cut, which may be empty. Raises ModelError.

    The structure of the modules is used for models that cannot be traced, and for those of which a larger part stays in
    one piece when they are, because a module with a list of modules inside cannot be traced. A model that can be cut in
    neither way is one layer.
    """
    if cutting.by == "nothing":
        layers: Layers = Uncut(model, input, cutting.reason)
        return layers, layers.report()
    if cutting.by == "modules":
        structure = Structure(model, input, cutting.without)
        return structure, _note(model, structure, cutting.reason)
    try:
        chain = Chain(model, input)
    except MadeLater:
        raise
    except ModelError as problem:
        return _without_graph(model, input, cutting, problem)
    if cutting.by == "graph" or not any(_has_list(module) for module in chain.whole_modules()):
        bond = chain.bond(0) if len(chain) == 1 else None
        return chain, f"{type(model).__name__} is not cut into layers: {bond}" if bond else chain.report()
    try:
        structure = Structure(model, input, cutting.without)
    except ModelError as error:
        return chain, f"parts of {type(model).__name__} stay in one piece: {error}"
    if _largest(structure) < _largest(chain):
        return structure, _note(model, structure)
    return chain, chain.report()


def _without_graph(model: nn.Module, input: InputSpec, cutting: Cutting, problem: ModelError) -> tuple[Layers, str]:
    """Return the layers of a model of which no graph can be recorded. Raises ModelError if the model does not run."""
    try:
        structure = Structure(model, input, cutting.without)
        return structure, _note(model, structure)
    except ModelError as error:
        reason = f"it does not run in parts: {error}"
    try:
        uncut = Uncut(model, input, reason)
    except ModelError as error:
        # What the model itself says when it runs is the reason; a graph knows more only of what was given to it.
        raise (error if isinstance(problem, Untraceable) else problem) from None
    return uncut, uncut.report()


def _note(model: nn.Module, structure: Structure, reason: str = "it cannot be traced") -> str:
    if len(structure) == 1:
        why = structure.bond(0) or "it is one module"
        found = f"{type(model).__name__} is not cut into layers: {reason}, and {why}"
    else:
        found = f"{type(model).__name__} is cut by its modules into {len(structure)} layers, because {reason}"
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
