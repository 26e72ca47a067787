"""Represents a model as a chain of layers that can be cut at many points.

`torch.fx` records the model's forward pass as a graph. The chain can be cut wherever exactly one tensor is alive,
because only that tensor then has to travel to the next stage. A slice of the chain is an ordinary module that runs its
part of the graph and keeps the model's own parameter names, so checkpoints do not depend on the cuts.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from horizonml.errors import ModelError, is_out_of_memory
from horizonml.models.tracing import straight_line, trace
from horizonml.tasks.task import InputSpec

_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "imatmul", "ipow")
)


@dataclass(frozen=True)
class Boundary:
    """Describes the input of a layer: its shape without the batch dimension, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes_per_sample(self) -> int:
        """Return the size of one sample's tensor in bytes."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size

    def example(self, rows: int, needs_gradient: bool = False) -> Tensor:
        """Return `rows` synthetic samples to measure with: noise, or zeros for a dtype that is not floating-point."""
        shape = (rows, *self.shape)
        if not self.dtype.is_floating_point:
            return torch.zeros(shape, dtype=self.dtype)
        return torch.randn(shape, dtype=self.dtype, requires_grad=needs_gradient)


class Chain:
    """Holds a model's layers in order.

    `names[i]` is the name of layer `i`; `boundaries[i]` describes its input, and the last entry of `boundaries`
    describes the model's output. `len(chain)` is the number of layers, so there are `len(chain) - 1` cut points.
    """

    def __init__(self, model: nn.Module, input: InputSpec) -> None:
        """Trace `model` (usually on the meta device) for inputs of shape `[batch, *input.shape]`.

        Raises ModelError if the model's forward pass cannot be recorded as a graph, is not a function of one tensor
        with the batch in its first dimension, or does not fit inputs of this shape.
        """
        self._model = model
        graph = trace(model)
        self._placeholder, self._nodes = straight_line(model, graph)
        self._segments = [[node] for node in self._nodes]
        self._segments = list(self._cut(_cut_points(model, self._placeholder, self._nodes)))
        self.boundaries = self._measure(input)
        self.names = _unique_names(self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    def slice(self, start: int, stop: int) -> fx.GraphModule:
        """Return layers `start` to `stop - 1` as a module with one input tensor; it shares the model's submodules."""
        assert 0 <= start < stop <= len(self), (start, stop, len(self))
        graph = fx.Graph()
        entry = self._placeholder if start == 0 else self._segments[start - 1][-1]
        copies = {entry: graph.placeholder("input")}
        for segment in self._segments[start:stop]:
            for node in segment:
                for source in node.all_input_nodes:
                    if source.op == "get_attr" and source not in copies:
                        copies[source] = graph.node_copy(source)
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(copies[self._segments[stop - 1][-1]])
        return fx.GraphModule(self._model, graph)

    def skip(self, index: int) -> tuple[str, str, int] | None:
        """Return the connection within a layer that skips the most operations: its two ends, and how many it skips.

        Return None if every operation of the layer takes the result of the one before it.
        """
        nodes = self._segments[index]
        entry = self._segments[index - 1][-1] if index else self._placeholder
        position = {node: number for number, node in enumerate([entry, *nodes])}
        spans = [
            (position[user] - position[source] - 1, source.name, user.name)
            for source in position
            for user in source.users
            if position.get(user, 0) > position[source]
        ]
        skipped, start, end = max(spans, default=(0, "", ""))
        return (start, end, skipped) if skipped else None

    def _cut(self, points: list[int]) -> Iterator[list[fx.Node]]:
        start = 0
        for point in [*points, len(self._nodes)]:
            yield self._nodes[start:point]
            start = point

    def _measure(self, input: InputSpec) -> list[Boundary]:
        """Return the boundaries, from a run on zeros; layers are merged where the batch is not the first dimension."""
        training = self._model.training
        self._model.eval()
        try:
            shapes = [self._run_on_zeros(batch, input) for batch in (1, 2)]
        finally:
            self._model.train(training)
        boundaries, segments, pending = [], [], []
        boundaries.append(Boundary(tuple(input.shape), input.dtype))
        for segment, one, two in zip(self._segments, *shapes, strict=True):
            pending += segment
            if _batch_first(one, two):
                segments.append(pending)
                boundaries.append(Boundary(tuple(one.shape[1:]), one.dtype))
                pending = []
        if pending:
            raise ModelError(
                f"{type(self._model).__name__} does not return one tensor with the batch in its first dimension"
            )
        self._segments = segments
        return boundaries

    def _run_on_zeros(self, batch: int, input: InputSpec) -> list[Tensor]:
        """Return the outputs of all layers, with the parameters of one layer in memory at a time.

        The layers do not run on the meta device, whose Python kernels would load torch's compiler into every rank (70
        MB).
        """
        value = torch.zeros(batch, *input.shape, dtype=input.dtype)
        outputs = []
        for index in range(len(self)):
            layer = self.slice(index, index + 1)
            tensors = {
                name: torch.zeros(tensor.shape, dtype=tensor.dtype)
                for name, tensor in itertools.chain(layer.named_parameters(), layer.named_buffers())
            }
            try:
                with torch.no_grad():
                    value = torch.func.functional_call(layer, tensors, (value,))
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                where = self._segments[index][-1]
                raise ModelError(
                    f"{type(self._model).__name__} does not accept inputs of shape {list(input.shape)} "
                    f"(fails at {where.target}): {error}. {input.advice}".rstrip()
                ) from error
            outputs.append(value)
        return outputs


def _batch_first(one: object, two: object) -> bool:
    """Return whether these outputs for batches of 1 and 2 differ in their first dimension and nowhere else."""
    return (
        isinstance(one, Tensor)
        and isinstance(two, Tensor)
        and one.dim() > 0
        and one.dtype == two.dtype
        and one.dtype.is_floating_point
        and (one.shape[0], two.shape[0]) == (1, 2)
        and one.shape[1:] == two.shape[1:]
    )


def _cut_points(model: nn.Module, placeholder: fx.Node, nodes: list[fx.Node]) -> list[int]:
    """Return the indices `i` such that the chain may be cut before `nodes[i]`."""
    position = {node: index for index, node in enumerate(nodes)}
    last_use = {
        node: max((position[user] for user in node.users if user in position), default=position.get(node, -1))
        for node in [placeholder, *nodes]
    }
    first, last = _parameter_spans(model, nodes)
    points = []
    for index in range(1, len(nodes)):
        alive = [node for node in [placeholder, *nodes[:index]] if last_use[node] >= index]
        if alive != [nodes[index - 1]]:
            continue
        # The next stage receives this tensor as a leaf of its graph, which must not be changed in place.
        if any(_changes(model, user, alive[0]) for user in alive[0].users):
            continue
        if any(first[name] < index <= last[name] for name in first):
            continue
        points.append(index)
    return points


def _parameter_spans(model: nn.Module, nodes: list[fx.Node]) -> tuple[dict[int, int], dict[int, int]]:
    """Return where each parameter or buffer is first and last used; a shared one must stay in one stage."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, node in enumerate(nodes):
        tensors: list[Tensor] = []
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            tensors += [*module.parameters(), *module.buffers()]
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                tensors.append(operator.attrgetter(str(source.target))(model))
        for tensor in tensors:
            first.setdefault(id(tensor), index)
            last[id(tensor)] = index
    return first, last


def _changes(model: nn.Module, user: fx.Node, value: fx.Node) -> bool:
    """Return whether the operation `user` may change `value` in place."""
    if not user.args or user.args[0] is not value:
        return False
    if user.op == "call_module":
        return bool(getattr(model.get_submodule(str(user.target)), "inplace", False))
    if user.op == "call_method":
        return str(user.target).endswith("_")
    name = getattr(user.target, "__name__", "")
    return (
        user.target in _IN_PLACE_OPERATORS
        or (name.endswith("_") and not name.endswith("__"))
        or bool(user.kwargs.get("inplace", False))
    )


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
