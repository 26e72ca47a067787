"""A model as a chain of layers that can be cut at many points.

`torch.fx` writes the model's forward pass down as a graph. The chain may be cut wherever exactly one tensor is
alive, for only that tensor then has to travel to the next stage. A slice of the chain is an ordinary module that
runs its part of the graph and keeps the model's own parameter names, so checkpoints do not depend on the cuts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from horizonml.errors import ModelError, is_out_of_memory
from horizonml.tasks.task import InputSpec

_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "imatmul", "ipow")
)


@dataclass(frozen=True)
class Boundary:
    """The tensor that enters a layer: its shape without the batch dimension, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes_per_sample(self) -> int:
        """The size of one sample's tensor in bytes."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size

    def example(self, rows: int, needs_gradient: bool = False) -> Tensor:
        """Return `rows` made-up samples to measure with: noise, or zeros where the dtype is no float."""
        shape = (rows, *self.shape)
        if not self.dtype.is_floating_point:
            return torch.zeros(shape, dtype=self.dtype)
        return torch.randn(shape, dtype=self.dtype, requires_grad=needs_gradient)


class Chain:
    """A model's layers in order.

    `names[i]` is the name of layer `i`; `boundaries[i]` is the tensor that enters it, and the last entry of
    `boundaries` is the model's output. `len(chain)` counts the layers, so there are `len(chain) - 1` cut points.
    """

    def __init__(self, model: nn.Module, input: InputSpec) -> None:
        """Trace `model` (usually on the meta device) for inputs of shape `[batch, *input.shape]`.

        Raises ModelError if the model's forward pass cannot be written down as a graph, is not a function of
        one tensor with the batch in its first dimension, or does not fit inputs of this shape.
        """
        self._model = model
        graph = _trace(model)
        self._placeholder, self._nodes = _straight_line(model, graph)
        self._segments = [[node] for node in self._nodes]
        self._segments = list(self._cut(_cut_points(model, self._placeholder, self._nodes)))
        self.boundaries = self._measure(input)
        self.names = _unique_names(self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    def slice(self, start: int, stop: int) -> fx.GraphModule:
        """Return layers `start` to `stop - 1` as one module of one tensor; it shares the model's submodules."""
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
        """Return the connection within a layer that skips most operations: both its ends, and how many it skips.

        None if every operation of the layer takes what the one before it returns.
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
        """Run every layer on a few zeros; merge layers between which the batch is not the first dimension."""
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
        """Return the outputs of all layers. One layer's parameters are in memory at a time.

        Not on the meta device: its Python kernels would load torch's compiler into every rank (70 MB).
        """
        value = torch.zeros(batch, *input.shape, dtype=input.dtype)
        outputs = []
        for index in range(len(self)):
            layer = self.slice(index, index + 1)
            tensors = {
                name: torch.zeros(tensor.shape, dtype=tensor.dtype)
                for name, tensor in layer.state_dict(keep_vars=True).items()
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
    """Whether these outputs for batches of 1 and 2 differ in their first dimension and nowhere else."""
    return (
        isinstance(one, Tensor)
        and isinstance(two, Tensor)
        and one.dim() > 0
        and one.dtype == two.dtype
        and one.dtype.is_floating_point
        and (one.shape[0], two.shape[0]) == (1, 2)
        and one.shape[1:] == two.shape[1:]
    )


class _Tracer(fx.Tracer):
    """Traces down to PyTorch's own layers, but takes the modules named in `leaves` as they are."""

    def __init__(self, leaves: set[str]) -> None:
        super().__init__()
        self._leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves or super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module) -> fx.Graph:
    """The model's graph, the same in training and evaluation.

    A submodule whose forward cannot be traced (it branches on its input), or that would be frozen in the
    current mode (it reads `self.training`), becomes one node that runs the module itself.
    """
    leaves: set[str] = set()
    training = model.training
    try:
        while True:
            graphs = []
            for mode in (True, False):
                model.train(mode)
                graphs.append(_trace_once(model, leaves))
                if graphs[-1] is None:
                    break
            else:
                train, evaluate = graphs
                assert train is not None
                assert evaluate is not None
                culprit = _first_difference(train, evaluate)
                if culprit is None:
                    return train
                if not culprit or culprit in leaves:
                    raise ModelError(
                        f"the forward of {type(model).__name__} itself depends on train/eval mode; move that part "
                        "into a submodule, so that the model can be cut into layers"
                    )
                leaves.add(culprit)
    finally:
        model.train(training)


def _trace_once(model: nn.Module, leaves: set[str]) -> fx.Graph | None:
    """One attempt; None, and a new leaf, if a submodule stood in the way."""
    tracer = _Tracer(leaves)
    try:
        return tracer.trace(model)
    except Exception as error:  # the model's own code runs here, on stand-ins: it may fail in any way
        if is_out_of_memory(error):
            raise
        stack = list(tracer.module_stack.values())
        if not stack or stack[-1][0] in leaves:
            raise ModelError(
                f"{type(model).__name__} cannot be cut into layers: {error}. Its forward must take one tensor and "
                "not branch on its values; parts that do can be moved into a submodule."
            ) from error
        leaves.add(stack[-1][0])
        return None


def _first_difference(left: fx.Graph, right: fx.Graph) -> str | None:
    """The innermost module at the first node in which two graphs differ; "" for the model itself."""
    pairs = list(zip(left.nodes, right.nodes, strict=False))
    for one, other in pairs:
        if (one.op, str(one.target), str(one.args), str(one.kwargs)) != (
            other.op,
            str(other.target),
            str(other.args),
            str(other.kwargs),
        ):
            stack = list((one.meta.get("nn_module_stack") or {}).values())
            return str(stack[-1][0]) if stack else ""
    return None if len(left.nodes) == len(right.nodes) else ""


def _straight_line(model: nn.Module, graph: fx.Graph) -> tuple[fx.Node, list[fx.Node]]:
    """The graph's one input and its computing nodes; checks that it has one output that is the last node."""
    graph.owning_module = model  # type: ignore[assignment]  # lets fx tell which modules may be dropped
    graph.eliminate_dead_code()
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    used = [node for node in placeholders if node.users]
    if len(used) != 1:
        raise ModelError(f"the model's forward must take one tensor; it takes {len(used)}")
    result = graph.output_node().args[0]
    if not isinstance(result, fx.Node):
        raise ModelError("the model's forward must return one tensor; it returns a collection")
    nodes = [n for n in graph.nodes if n.op in ("call_module", "call_function", "call_method")]
    if not nodes or result is not nodes[-1]:
        raise ModelError("the model's last operation must be the one whose result it returns")
    return used[0], nodes


def _cut_points(model: nn.Module, placeholder: fx.Node, nodes: list[fx.Node]) -> list[int]:
    """Indices `i` such that the chain may be cut before `nodes[i]`."""
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
    """First and last position at which each parameter or buffer is used (a shared one must stay in one stage)."""
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
    """Whether the operation `user` may change `value` in place."""
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
    """A name for each layer: what the modules in it have in common, else its last operation."""
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
