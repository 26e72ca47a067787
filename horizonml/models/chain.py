"""Represents a model as a chain of layers that can be cut at many points.

`torch.fx` records the model's forward pass as a graph. The chain can be cut wherever exactly one tensor is alive,
because only that tensor then has to travel to the next stage. Where this leaves a large part of the model in one piece,
as with the skip connections of a U-Net, that part is cut before its weights, and all tensors that are alive there
travel. A slice of the chain is an ordinary module that runs its part of the graph and keeps the model's own parameter
names, so checkpoints do not depend on the cuts.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any

from torch import fx, nn

from horizonml.data.tensors import TensorSpec
from horizonml.errors import ModelError
from horizonml.models.boundary import Boundary, Layers, flat, output_boundary, unique_names
from horizonml.models.cuts import Graph, cut_points, require_same
from horizonml.models.tracing import trace
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

    def slice(self, start: int, stop: int, of: nn.Module | None = None) -> fx.GraphModule:
        """Return layers, as `Layers.slice` says, with the submodules of `of`, a larger slice that is in memory."""
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
        root = self._model if of is None else of
        module = fx.GraphModule(root, graph)
        copy_persistence(root, module)
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
