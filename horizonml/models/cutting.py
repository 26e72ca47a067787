"""Cuts a model into layers: by its graph where `torch.fx` can record it, and else by the structure of its modules.

`torch.fx` records the model's forward pass as a graph. The chain can be cut wherever exactly one tensor is alive,
because only that tensor then has to travel to the next stage. Where this leaves a large part of the model in one piece,
as with the skip connections of a U-Net, that part is cut before its weights, and all tensors that are alive there
travel. A slice of the chain is an ordinary module that runs its part of the graph and keeps the model's own parameter
names, so checkpoints do not depend on the cuts.

A model that can be cut in neither way is a single layer, which a rank trains whole, by its author's own code.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from horizonml.data.dataset import TensorSpec
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
    unique_names,
)
from horizonml.models.cuts import Graph, cut_points, require_same
from horizonml.models.structure import LISTS, Structure
from horizonml.models.tracing import MadeLater, Untraceable, trace, tried_out
from horizonml.models.weights import aliases, copy_persistence
from horizonml.tasks.task import InputSpec
from horizonml.text import count, some

_GRAPH_NAMES = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))


class Chain(Layers):
    """Holds the layers of a model whose graph can be recorded."""

    def __init__(self, model: nn.Module, input: InputSpec) -> None:
        """Trace `model` (usually on the meta device) for inputs of shape `[batch, *input.shape]`.

        Raises ModelError if the model's forward pass cannot be recorded as a graph, is not a function of tensors with
        the batch in their first dimension, or does not fit inputs of this shape.
        """
        registered = (*model._modules, *model._parameters, *model._buffers)
        taken = next((name for name in registered if name in _GRAPH_NAMES), None)
        if taken is not None:
            raise ModelError(f"its {taken} has a name that PyTorch's graphs use themselves")
        self._model = model
        self._graph = Graph(model, trace(model, input.names), input)
        points = cut_points(self._graph)
        self._stops = [*points, len(self._graph.nodes)]
        self.boundaries = [Boundary(tuple(input.tensors)), *map(self._boundary, points), self._output()]
        layers = [self._nodes(index) for index in range(len(self))]
        paths = [[str(node.target) for node in nodes if node.op == "call_module"] for nodes in layers]
        last = [nodes[-1].name for nodes in layers]
        self.names = unique_names(zip(paths, last, last, strict=True))
        self._aliases = aliases(model)

    def _nodes(self, index: int) -> list[fx.Node]:
        """Return the operations of a layer."""
        return self._graph.nodes[slice(*self._span(index, index + 1))]

    def slice(self, start: int, stop: int) -> fx.GraphModule:
        """Return layers, as `Layers.slice` says."""
        first, last = self._span(start, stop)
        source, graph = self._graph, fx.Graph()
        entering = source.alive(first)
        names = ["input"] if len(entering) == 1 else [f"input_{number}" for number in range(len(entering))]
        copies = {node: graph.placeholder(name) for node, name in zip(entering, names, strict=True)}

        def copy_of(node: fx.Node) -> Any:
            return source.statics[node] if node in source.statics else copies[node]

        def provide(node: fx.Node) -> None:
            """Copy what does not depend on the input to where it is used first."""
            if node in source.statics:
                return
            if node not in copies and node in source.constants:
                for needed in node.all_input_nodes:
                    provide(needed)
                copies[node] = graph.node_copy(node, copy_of)

        for node in source.nodes[first:last]:
            for needed in node.all_input_nodes:
                provide(needed)
            copies[node] = graph.node_copy(node, copy_of)
            for keys, value in source.returned.get(node, ()):
                found = copies[node]
                for key in keys:
                    found = graph.call_function(operator.getitem, (found, key))
                graph.call_function(require_same, (found, value, str(node.target)))
        for name in self._other_names(copies.keys() - set(entering)):
            graph.get_attr(name)
        if stop == len(self):
            for name in self.spare:
                graph.get_attr(name)
            result: Any = fx.map_arg(source.result, copy_of)
        else:
            leaving = tuple(copies[node] for node in source.alive(last))
            result = leaving[0] if len(leaving) == 1 else leaving
        graph.output(result)
        module = fx.GraphModule(self._model, graph)
        copy_persistence(self._model, module)
        return module

    def _other_names(self, nodes: Iterable[fx.Node]) -> list[str]:
        """Return the further names of tensors that these operations use, so that checkpoints have all of them."""
        if not self._aliases:
            return []
        used = {id(tensor) for node in nodes for tensor in self._graph.tensors(node)}
        named = dict(itertools.chain(self._model.named_parameters(), self._model.named_buffers()))
        return [alias for alias, name in self._aliases.items() if id(named.get(name)) in used]

    def bond(self, index: int) -> str | None:
        nodes = self._nodes(index)
        names = {id(tensor): name for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]}
        users: dict[int, list[fx.Node]] = {}
        for node in nodes:
            for tensor in self._graph.tensors(node):
                users.setdefault(id(tensor), []).append(node)
        shared = {key: found for key, found in users.items() if len(found) > 1}
        position = {
            node: number for number, node in enumerate([*self._graph.alive(self._span(index, index + 1)[0]), *nodes])
        }
        if shared:
            widest = max(shared, key=lambda key: position[shared[key][-1]] - position[shared[key][0]])
            first, last = shared[widest][0].name, shared[widest][-1].name
            return f"{names.get(widest, 'a parameter')} is used both by {first} and by {last}"
        spans = [
            (position[user] - position[source] - 1, source.name, user.name)
            for source in position
            for user in source.users
            if position.get(user, 0) > position[source]
        ]
        skipped, start, end = max(spans, default=(0, "", ""))
        return f"the connection from {start} to {end} skips {count(skipped, 'operation')}" if skipped else None

    def report(self) -> str:
        used = {id(tensor) for node in self._graph.nodes for tensor in self._graph.tensors(node)}
        unused = [name for name, parameter in self._model.named_parameters() if id(parameter) not in used]
        return f"its forward never uses {some(unused)}, which training does not change" if unused else ""

    def whole_modules(self) -> list[nn.Module]:
        """Return the modules that are run as a whole, because they are PyTorch's own or cannot be traced."""
        names = {str(node.target) for node in self._graph.nodes if node.op == "call_module"}
        return [self._model.get_submodule(name) for name in sorted(names)]

    def _boundary(self, stop: int) -> Boundary:
        """Return the boundary before an operation; gradients travel back for what depends on trained parameters."""
        crossing = [(self._graph.tensor(node), self._graph.learned(node)) for node in self._graph.alive(stop)]
        return Boundary(
            tuple(
                TensorSpec(spec.shape, spec.dtype, learned and spec.dtype.is_floating_point)
                for spec, learned in crossing
            )
        )

    def _output(self) -> Boundary:
        leaves = fx.map_arg(self._graph.result, lambda node: self._graph.statics.get(node, node))
        found = [self._graph.results.get(leaf) for leaf in flat(leaves) if leaf is not None]
        return output_boundary(self._model, [one if isinstance(one, TensorSpec) else None for one in found])


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
