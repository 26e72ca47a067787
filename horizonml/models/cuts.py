"""Finds the points at which a model's graph can be cut, and the tensors that would travel there.

It also finds out what each operation of a graph returns and what it changes in place, from a run on zeros.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizonml.data.dataset import TensorSpec
from horizonml.errors import ModelError, is_out_of_memory
from horizonml.models.boundary import per_sample, refused, run_on_zeros, seen, tensors_of
from horizonml.models.tracing import changed_by, tried_out
from horizonml.tasks.task import InputSpec


class Static:
    """Wraps a result that is not a tensor and does not depend on the batch, such as the height of an image."""

    def __init__(self, value: Any) -> None:
        self.value = value


Result = TensorSpec | Static | None
"""What an operation returns: a tensor with the batch in its first dimension, a constant, or anything else."""


def _compare(one: dict[fx.Node, Any], two: dict[fx.Node, Any]) -> dict[fx.Node, Result]:
    """Return what each node results in, having seen it for batches of 1 and 2."""
    results: dict[fx.Node, Result] = {}
    for node, value in one.items():
        other = two[node]
        # What is computed from the number of rows may be the same for both batches, and differ for larger ones.
        counted = node.target is not operator.getitem and any(
            results[source] is None and _is_plain(one[source]) for source in node.all_input_nodes
        )
        if isinstance(value, TensorSpec) and isinstance(other, TensorSpec):
            results[node] = per_sample(value, other)
        else:
            same = _is_plain(value) and type(value) is type(other) and value == other
            results[node] = Static(value) if same and not counted else None
    return results


_OPAQUE = object()  # stands for what is neither a tensor nor a constant


def _is_plain(value: Any) -> bool:
    """Return whether a value can be written into a graph as a constant."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str | torch.dtype | torch.device)


@dataclass
class _Run:
    """Holds what was seen in one run; tensors that share memory have numbers in common."""

    found: dict[fx.Node, Any] = field(default_factory=dict)
    memory: dict[fx.Node, frozenset[int]] = field(default_factory=dict)  # in which the tensors are that a node returns
    changes: dict[fx.Node, frozenset[int]] = field(default_factory=dict)  # memory that a node changes in place


def _run(model: nn.Module, graph: fx.Graph, inputs: Sequence[fx.Node], input: InputSpec, batch: int) -> _Run:
    """Run the graph on a batch of zeros, with the parameters of one operation in memory at a time.

    It does not run on the meta device, whose Python kernels would load torch's compiler into every rank (70 MB).
    """
    fed = {
        node: torch.zeros(batch, *spec.shape, dtype=spec.dtype)
        for node, spec in zip(inputs, input.tensors, strict=True)
    }
    values: dict[fx.Node, Any] = {}
    run = _Run()
    last_use = {source: node for node in graph.nodes for source in node.all_input_nodes}
    for number, node in enumerate(graph.nodes):
        if node.op == "output":
            break
        before = {one: _versions(value) for one, value in values.items()}
        if node.op == "placeholder":
            values[node] = fed.get(node)
        else:
            try:
                with torch.no_grad():
                    values[node] = _result(model, node, values)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                raise refused(model, input, error, at=f" (fails at {node.target})") from error
        value = values[node]
        changed = [run.memory[one] for one, versions in before.items() if _versions(values[one]) != versions]
        if changed:
            run.changes[node] = frozenset().union(*changed)
        places = _storages(value)
        shared = [run.memory[one] for one in node.all_input_nodes if places & _storages(values[one])]
        run.memory[node] = frozenset((number,)).union(*shared)
        run.found[node] = seen(value) if isinstance(value, Tensor) else _OPAQUE if tensors_of(value) else value
        for source in [*node.all_input_nodes, node]:
            if last_use.get(source, source) is node:
                values.pop(source, None)
    return run


def _versions(value: Any) -> list[int]:
    return [tensor._version for tensor in tensors_of(value)]


def _storages(value: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors_of(value)}


def _result(model: nn.Module, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Return what one operation returns."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(model)
        return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) and value.is_meta else value
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return run_on_zeros(module, args, kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


_COMPUTES = ("call_module", "call_function", "call_method")
_RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial")
_LARGE = 8  # a piece with more than one in so many of the model's weights is cut further
_FEWEST_WEIGHTS = 4  # that a piece must have for that
_MOST_PIECES = 16  # into which it is cut


def require_same(value: Any, recorded: Any, path: str) -> None:
    """Raise ModelError if a module returns another value beside its tensors than when the graph was recorded."""
    if type(value) is not type(recorded) or value != recorded:
        raise ModelError(
            f"{path} returns {str(value)[:40]} where it returned {str(recorded)[:40]} when the model was cut, and "
            "stages without it do not see that; return it as a tensor (parallel.strategy: ddp trains the model whole)"
        )


def _returned_by_modules(statics: Mapping[fx.Node, Any]) -> dict[fx.Node, list[tuple[list[Any], Any]]]:
    """Return which constants of a graph modules return, with the keys by which each is found, by the node of the call.

    Raises ModelError if a constant is all that a module returns.
    """
    found: dict[fx.Node, list[tuple[list[Any], Any]]] = {}
    for node, value in statics.items():
        keys: list[Any] = []
        while node.op == "call_function" and node.target is operator.getitem:
            source, key = node.args
            if not isinstance(source, fx.Node) or isinstance(key, fx.Node):
                break
            keys.insert(0, key)
            node = source
        if node.op == "call_module" and not keys:
            raise ModelError(f"{node.target} returns {str(value)[:40]}, which is no tensor")
        if node.op == "call_module":
            found.setdefault(node, []).append((keys, value))
    return found


def _is_own(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.")


class Graph:
    """Holds a model's graph in the form that cuts need."""

    def __init__(self, model: nn.Module, graph: fx.Graph, input: InputSpec) -> None:
        """Prepare the graph, and run it on zeros. Raises ModelError."""
        graph.owning_module = model  # type: ignore[assignment]  # lets fx tell which modules may be dropped
        self.model = model
        self.inputs = _inputs(graph, input.names)
        with tried_out(model):
            model.eval()
            one, two = (_run(model, graph, self.inputs, input, batch) for batch in (1, 2))
        self.results, self._memory, self._changes = _compare(one.found, two.found), two.memory, two.changes
        for node in graph.nodes:  # some modules change tensors in training only
            if (changed := changed_by(model, node)) is not None:
                self._changes[node] = self._changes.get(node, frozenset()) | self._memory[changed]
        graph.eliminate_dead_code(lambda node: bool(self._changes.get(node)) or node.is_impure())
        # Numbers that do not depend on the batch, such as an image's height, become part of every slice.
        self.statics = {node: one.value for node, one in self.results.items() if isinstance(one, Static)}
        for node in graph.nodes:
            given = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, list | dict)]
            if node.op == "call_module" and given and _is_own(model.get_submodule(str(node.target))):
                raise ModelError(f"{node.target} is given a list or dict, which it may change")
        self.returned = _returned_by_modules(self.statics)
        self.result: Any = graph.output_node().args[0]
        self.constants = _constants(graph)  # what does not depend on the inputs; every slice computes its own
        left_out = {*self.constants, *self.statics}
        self.nodes = [node for node in graph.nodes if node.op in _COMPUTES and node not in left_out]
        returned: list[fx.Node] = []
        fx.map_arg(self.result, lambda node: None if node in self.statics else returned.append(node))
        if not self.nodes or not returned or any(node not in set(self.nodes) for node in returned):
            raise ModelError("the model must return the results of operations on its input")
        self._position = {node: index for index, node in enumerate(self.nodes)}
        end = len(self.nodes)
        self._last_use = {
            node: max([self._position[user] for user in node.users if user in self._position], default=-1)
            for node in [*self.inputs, *self.nodes]
        }
        for node in returned:
            self._last_use[node] = end
        self._changed_last: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            self._changed_last |= dict.fromkeys(self._changes.get(node, ()), index)
        self._learned, self._flows = self._find_learned(), self._find_flows(returned)

    def alive(self, index: int) -> list[fx.Node]:
        """Return the inputs and results before operation `index` that it or a later one uses; inputs come first."""
        if index == 0:
            return list(self.inputs)
        return [node for node in [*self.inputs, *self.nodes[:index]] if self._last_use[node] >= index]

    def tensor(self, node: fx.Node) -> TensorSpec:
        """Return the description of a result that crosses a cut."""
        found = self.results[node]
        assert isinstance(found, TensorSpec)
        return found

    def can_travel(self, nodes: Sequence[fx.Node]) -> bool:
        """Return whether these results can be sent to another rank: tensors with the batch first, not all integers."""
        specs = [self.results[node] for node in nodes]
        tensors = [spec for spec in specs if isinstance(spec, TensorSpec)]
        return len(tensors) == len(specs) and any(spec.dtype.is_floating_point for spec in tensors)

    def learned(self, node: fx.Node) -> bool:
        """Return whether a result depends on trained parameters, and what the model returns on it."""
        return node in self._learned and node in self._flows

    def tensors(self, node: fx.Node) -> list[Tensor]:
        """Return the parameters and buffers that an operation uses itself."""
        found: list[Tensor] = []
        if node.op == "call_module":
            module = self.model.get_submodule(str(node.target))
            found += [*module.parameters(), *module.buffers()]
        for source in self._constant_sources(node):
            value = operator.attrgetter(str(source.target))(self.model)
            if isinstance(value, Tensor):
                found.append(value)
        return found

    def weighs(self, node: fx.Node) -> bool:
        """Return whether an operation has weights of its own: tensors of two dimensions or more."""
        return any(isinstance(tensor, nn.Parameter) and tensor.dim() > 1 for tensor in self.tensors(node))

    def may_be_changed(self, node: fx.Node, index: int) -> bool:
        """Return whether operation `index` or a later one may change a result in place, or one that it is a view of."""
        return any(self._changed_last.get(memory, -1) >= index for memory in self._memory[node])

    def _constant_sources(self, node: fx.Node) -> list[fx.Node]:
        """Return the attributes of the model that an operation uses, by way of constants."""
        found, stack = [], [source for source in node.all_input_nodes if source in self.constants]
        while stack:
            source = stack.pop()
            if source.op == "get_attr":
                found.append(source)
            stack += source.all_input_nodes
        return found

    def _find_learned(self) -> set[fx.Node]:
        found: set[fx.Node] = set()
        written: set[int] = set()  # memory to which something learned has been written in place
        for node in self.nodes:
            own = any(isinstance(tensor, nn.Parameter) and tensor.requires_grad for tensor in self.tensors(node))
            sources = [source for source in node.all_input_nodes if source in self.results]
            if _detaches(node):
                continue
            if own or any(source in found or written & self._memory[source] for source in sources):
                found.add(node)
                written |= self._changes.get(node, frozenset())
        return found | {node for node in self.nodes if written & self._memory[node]}

    def _find_flows(self, returned: Sequence[fx.Node]) -> set[fx.Node]:
        """Return the nodes to which gradients flow from what the model returns, if anything is learned there."""
        found: set[fx.Node] = set(returned)
        read = frozenset[int]().union(*(self._memory[node] for node in returned))  # memory that gradients flow through
        for node in reversed(self.nodes):
            if (node in found or read & self._changes.get(node, frozenset())) and not _detaches(node):
                sources = [source for source in node.all_input_nodes if source in self.results]
                found.update(sources)
                read = read.union(*(self._memory[source] for source in sources))
        return found


def _detaches(node: fx.Node) -> bool:
    """Return whether no gradient flows through an operation."""
    return getattr(node.target, "__name__", node.target) == "detach"


def cut_points(graph: Graph) -> list[int]:
    """Return the indices `i` such that the model may be cut before operation `i`.

    A cut that one tensor crosses is always allowed. Pieces that are still large are cut further, before operations with
    weights, where several tensors cross the cut: of neighbouring ones, where they take the fewest bytes.
    """

    def crossing(index: int) -> int:
        return sum(graph.tensor(node).bytes_per_sample for node in graph.alive(index))

    possible, computed = _possible(graph), set(graph.nodes)
    points = [index for index in possible if len(graph.alive(index)) == 1 and graph.alive(index)[0] in computed]
    weights = [index for index, node in enumerate(graph.nodes) if graph.weighs(node)]
    for start, stop in zip([0, *points], [*points, len(graph.nodes)], strict=True):
        inside = [index for index in weights if start < index < stop]
        if len(inside) >= _FEWEST_WEIGHTS and len(inside) * _LARGE > len(weights):
            inside = sorted(set(possible).intersection(inside))
            step = -(-len(inside) // _MOST_PIECES)
            points += [min(inside[at : at + step], key=crossing) for at in range(0, len(inside), step or 1)]
    return sorted(set(points))


def _possible(graph: Graph) -> list[int]:
    """Return the indices before which a cut would be correct, however many tensors cross it."""
    first, last = _spans(graph)
    blocked: set[int] = set()
    for tensor, begin in first.items():
        blocked.update(range(begin + 1, last[tensor] + 1))
    # The next stage receives tensors as leaves of its graph, which must not be changed in place.
    return [
        index
        for index in range(1, len(graph.nodes))
        if index not in blocked
        and graph.can_travel(graph.alive(index))
        and not any(graph.may_be_changed(node, index) for node in graph.alive(index))
    ]


def _spans(graph: Graph) -> tuple[dict[int, int], dict[int, int]]:
    """Return where each parameter or buffer is first and last used; a shared one must stay in one stage."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        for tensor in graph.tensors(node):
            first.setdefault(id(tensor), index)
            last[id(tensor)] = index
    return first, last


def _inputs(graph: fx.Graph, names: Sequence[str]) -> list[fx.Node]:
    """Return the nodes of the model's inputs in the order of `names`, or in their own. Raises ModelError."""
    placeholders = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    used = [node for node in placeholders.values() if node.users]
    if not names:
        if len(used) != 1:
            raise ModelError(f"the model's forward must take one tensor; it takes {len(used)}")
        return used
    missing = [name for name in names if name not in placeholders]
    if missing:
        raise ModelError(f"the model's forward does not take {missing[0]!r}; it takes {', '.join(placeholders)}")
    if unfed := [str(node.target) for node in used if str(node.target) not in names]:
        raise ModelError(f"the model's forward needs {unfed[0]!r}, which the data does not have")
    return [placeholders[name] for name in names]


def _constants(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on no input, and give the same result each time."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            found.add(node)
        elif node.op in ("call_function", "call_method"):
            name = str(getattr(node.target, "__name__", node.target))
            random = any(word in name for word in _RANDOM)
            if not random and all(source in found for source in node.all_input_nodes):
                found.add(node)
    return found
