"""Represents a model as a chain of layers that can be cut at many points.

`torch.fx` records the model's forward pass as a graph. The chain can be cut wherever exactly one tensor is alive,
because only that tensor then has to travel to the next stage. Where this leaves a large part of the model in one piece,
as with the skip connections of a U-Net, that part is cut before its weights, and all tensors that are alive there
travel. A slice of the chain is an ordinary module that runs its part of the graph and keeps the model's own parameter
names, so checkpoints do not depend on the cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizonml.data.tensors import TensorSpec
from horizonml.errors import ModelError, is_out_of_memory
from horizonml.models.boundary import Boundary, flat, values_of
from horizonml.models.cuts import Graph, cut_points
from horizonml.models.tracing import trace
from horizonml.tasks.task import InputSpec


class Chain:
    """Holds a model's layers in order.

    `names[i]` is the name of layer `i`; `boundaries[i]` describes its input, and the last entry of `boundaries`
    describes the model's output. `len(chain)` is the number of layers, so there are `len(chain) - 1` cut points.
    """

    def __init__(self, model: nn.Module, input: InputSpec) -> None:
        """Trace `model` (usually on the meta device) for inputs of shape `[batch, *input.shape]`.

        Raises ModelError if the model's forward pass cannot be recorded as a graph, is not a function of tensors with
        the batch in their first dimension, or does not fit inputs of this shape.
        """
        self._model = model
        self._graph = Graph(model, trace(model, input.names), input.names)
        self._stops = [*cut_points(self._graph), len(self._graph.nodes)]
        self.boundaries = self._measure(input)
        self.names = _unique_names([self._nodes(index) for index in range(len(self))])

    def __len__(self) -> int:
        return len(self._stops)

    def _nodes(self, index: int) -> list[fx.Node]:
        """Return the operations of a layer."""
        return self._graph.nodes[self._start(index) : self._stops[index]]

    def _start(self, index: int) -> int:
        return self._stops[index - 1] if index else 0

    def slice(self, start: int, stop: int) -> fx.GraphModule:
        """Return layers `start` to `stop - 1` as a module that takes the tensors of boundary `start` one by one.

        It returns the tensor of boundary `stop`, or a tuple if there are several; the last layer returns what the
        model returns. The module shares the model's submodules.
        """
        assert 0 <= start < stop <= len(self), (start, stop, len(self))
        first, last = self._start(start), self._stops[stop - 1]
        source, graph = self._graph, fx.Graph()
        entering = source.alive(first)
        names = ["input"] if len(entering) == 1 else [f"input_{number}" for number in range(len(entering))]
        copies = {node: graph.placeholder(name) for node, name in zip(entering, names, strict=True)}

        def provide(node: fx.Node) -> None:
            """Copy what does not depend on the input to where it is used first."""
            if node not in copies and node in source.constants:
                for needed in node.all_input_nodes:
                    provide(needed)
                copies[node] = graph.node_copy(node, copies.__getitem__)

        for node in source.nodes[first:last]:
            for needed in node.all_input_nodes:
                provide(needed)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        if stop == len(self):
            result: Any = fx.map_arg(source.result, copies.__getitem__)
        else:
            leaving = tuple(copies[node] for node in source.alive(last))
            result = leaving[0] if len(leaving) == 1 else leaving
        graph.output(result)
        return fx.GraphModule(self._model, graph)

    def skip(self, index: int) -> tuple[str, str, int] | None:
        """Return the connection within a layer that skips the most operations: its two ends, and how many it skips.

        Return None if every operation of the layer takes the result of the one before it.
        """
        nodes = [*self._graph.alive(self._start(index)), *self._nodes(index)]
        position = {node: number for number, node in enumerate(nodes)}
        spans = [
            (position[user] - position[source] - 1, source.name, user.name)
            for source in position
            for user in source.users
            if position.get(user, 0) > position[source]
        ]
        skipped, start, end = max(spans, default=(0, "", ""))
        return (start, end, skipped) if skipped else None

    def _measure(self, input: InputSpec) -> list[Boundary]:
        """Return the boundaries, from a run on zeros; layers are merged where a boundary would not do as one."""
        training = self._model.training
        self._model.eval()
        try:
            one, two = (self._run_on_zeros(batch, input) for batch in (1, 2))
        finally:
            self._model.train(training)
        boundaries, stops = [Boundary(tuple(input.tensors))], []
        for index, stop in enumerate(self._stops):
            last = index + 1 == len(self._stops)
            specs = _specs(one[index], two[index])
            if specs is None and last:
                raise ModelError(
                    f"{type(self._model).__name__} does not return tensors with the batch in their first dimension"
                )
            if specs is not None and (last or any(spec.dtype.is_floating_point for spec in specs)):
                boundary = Boundary(specs) if last else self._marked(specs, stop)
                boundaries.append(boundary)
                stops.append(stop)
        self._stops = stops
        return boundaries

    def _marked(self, specs: tuple[TensorSpec, ...], stop: int) -> Boundary:
        """Return a boundary in which the tensors are marked that depend on parameters; if none does, all are."""
        learned = [self._graph.learned(node) for node in self._graph.alive(stop)]
        marks = [found and spec.dtype.is_floating_point for found, spec in zip(learned, specs, strict=True)]
        if not any(marks):
            marks = [spec.dtype.is_floating_point for spec in specs]
        return Boundary(tuple(TensorSpec(s.shape, s.dtype, mark) for s, mark in zip(specs, marks, strict=True)))

    def _run_on_zeros(self, batch: int, input: InputSpec) -> list[tuple[Any, ...]]:
        """Return the outputs of all layers, with the parameters of one layer in memory at a time.

        The layers do not run on the meta device, whose Python kernels would load torch's compiler into every rank (70
        MB).
        """
        values: tuple[Any, ...] = Boundary(tuple(input.tensors)).zeros(batch)
        outputs = []
        for index in range(len(self)):
            layer = self.slice(index, index + 1)
            tensors = {
                name: torch.zeros(tensor.shape, dtype=tensor.dtype)
                for name, tensor in itertools.chain(layer.named_parameters(), layer.named_buffers())
            }
            try:
                with torch.no_grad():
                    result = torch.func.functional_call(layer, tensors, values)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                where = self._nodes(index)[-1]
                shapes = " and ".join(str(list(tensor.shape)) for tensor in input.tensors)
                raise ModelError(
                    f"{type(self._model).__name__} does not accept inputs of shape {shapes} "
                    f"(fails at {where.target}): {error}. {input.advice}".rstrip()
                ) from error
            values = flat(result) if index + 1 == len(self) else values_of(result)
            outputs.append(values)
        return outputs


def _specs(one: Sequence[object], two: Sequence[object]) -> tuple[TensorSpec, ...] | None:
    """Return the descriptions of tensors, seen for batches of 1 and 2; None unless all have the batch first."""
    found = []
    for left, right in zip(one, two, strict=True):
        if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or left.dim() == 0 or left.dtype != right.dtype:
            return None
        if (left.shape[0], right.shape[0]) != (1, 2) or left.shape[1:] != right.shape[1:]:
            return None
        found.append(TensorSpec(tuple(left.shape[1:]), left.dtype))
    return tuple(found)


def _unique_names(segments: list[list[fx.Node]]) -> list[str]:
    """Return a name for each layer: what the names of its modules have in common, or else its last operation."""
    names: list[str] = []
    for segment in segments:
        paths = [str(node.target).split(".") for node in segment if node.op == "call_module"]
        common: list[str] = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) != 1:
                break
            common.append(parts[0])
        name = ".".join(common) or segment[-1].name
        taken = {name} & set(names)
        names.append(f"{name}.{segment[-1].name}" if taken else name)
    return names
