"""Cuts a model into layers: by its graph where `torch.fx` can record it, and else by the structure of its modules.

A model that can be cut in neither way is a single layer, which a rank trains whole.

Runs a model whole, by its author's own code; and represents a model that is not cut at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from horizonml.errors import ModelError, is_out_of_memory
from horizonml.models.boundary import (
    Boundary,
    Layers,
    arguments,
    flat,
    output_boundary,
    per_sample,
    refused,
    run_on_zeros,
    seen,
)
from horizonml.models.chain import Chain
from horizonml.models.structure import LISTS, Structure
from horizonml.models.tracing import MadeLater, Untraceable, tried_out
from horizonml.tasks.task import InputSpec

_REGISTRIES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class WholeModule(nn.Module):
    """Takes a model's inputs one by one and calls the model itself: its forward, its hooks and its `train`.

    `horizonml_root` is the model. It is not a submodule, which would change all names; this module shares its
    registries instead.
    """

    horizonml_root: nn.Module  # a name that no author gives to a module, which it would hide

    def __init__(self, root: nn.Module, names: tuple[str, ...]) -> None:
        """Wrap a model; `names` are those of its inputs, without any if it takes them in their order."""
        super().__init__()
        for registry in _REGISTRIES:
            self.__dict__[registry] = root.__dict__[registry]
        self.__dict__ |= {"horizonml_root": root, "_names": names}
        self.training = root.training

    def train(self, mode: bool = True) -> WholeModule:
        """Switch the model to training or evaluation by its own `train`."""
        self.horizonml_root.train(mode)
        self.training = mode
        return self

    def forward(self, *values: Tensor) -> object:
        """Return what the model returns."""
        args, kwargs = arguments(values, self.__dict__["_names"])
        return self.horizonml_root(*args, **kwargs)


class Uncut(Layers):
    """Holds a model as a single layer."""

    def __init__(self, model: nn.Module, input: InputSpec, reason: str) -> None:
        """Run the model once on zeros to learn what it returns; `reason` is why it is not cut. Raises ModelError."""
        self._model, self._input, self._reason = model, input, reason
        self.names, self._stops = [type(model).__name__], [1]
        self.boundaries = [Boundary(tuple(input.tensors)), _output(model, input)]

    def slice(self, start: int, stop: int) -> nn.Module:
        """Return the model itself."""
        assert (start, stop) == (0, 1), (start, stop)
        return WholeModule(self._model, self._input.names)

    def bond(self, index: int) -> str | None:
        return self._reason

    def report(self) -> str:
        return f"{type(self._model).__name__} is not cut into layers: {self._reason}"


def _output(model: nn.Module, input: InputSpec) -> Boundary:
    """Return the description of what a model returns for batches of one and of two samples. Raises ModelError."""
    sizes = 1, 2
    try:
        found = [_returned(model, input, rows) for rows in sizes]
    except ModelError:  # some layers cannot do with one sample
        sizes = 2, 3
        found = [_returned(model, input, rows) for rows in sizes]
    specs = [
        per_sample(seen(one), seen(two), sizes) if isinstance(one, Tensor) and isinstance(two, Tensor) else None
        for one, two in zip(*found, strict=True)
        if one is not None
    ]
    return output_boundary(model, specs)


@torch.no_grad()
def _returned(model: nn.Module, input: InputSpec, rows: int) -> tuple[object, ...]:
    """Return the leaves of what a model returns in evaluation mode for zeros, with zeros for its tensors."""
    values = [torch.zeros(rows, *spec.shape, dtype=spec.dtype) for spec in input.tensors]
    args, kwargs = arguments(values, input.names)
    try:
        with tried_out(model):
            model.eval()
            return flat(run_on_zeros(model, args, kwargs))
    except MadeLater:
        raise
    except Exception as error:  # the model's own code runs here, and may fail in any way
        if is_out_of_memory(error):
            raise
        raise refused(model, input, error) from error


@dataclass(frozen=True)
class Cutting:
    """Says how a model is cut into layers, so that all ranks cut it alike."""

    by: Literal["any", "graph", "modules", "nothing"] = "any"
    without: frozenset[int] = frozenset()  # calls of modules before which it is not cut; see `Structure`
    reason: str = ""  # why the model is not cut otherwise

    def to_json(self) -> dict[str, object]:
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
        uncut = Uncut(model, input, cutting.reason)
        return uncut, uncut.report()
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
