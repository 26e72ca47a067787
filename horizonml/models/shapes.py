"""Finds out what each operation of a graph returns and what it changes in place, from a run on zeros."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizonml.data.tensors import TensorSpec
from horizonml.errors import ModelError, is_out_of_memory
from horizonml.models.tracing import tried_out
from horizonml.tasks.task import InputSpec


class Static:
    """Wraps a result that is not a tensor and does not depend on the batch, such as the height of an image."""

    def __init__(self, value: Any) -> None:
        self.value = value


Result = TensorSpec | Static | None
"""What an operation returns: a tensor with the batch in its first dimension, a constant, or anything else."""


@dataclass
class Run:
    """Holds what was found out about the nodes of a graph; tensors that share memory have numbers in common."""

    results: dict[fx.Node, Result]
    memory: dict[fx.Node, frozenset[int]]
    """The memory in which the tensors are that a node returns."""
    changes: dict[fx.Node, frozenset[int]]
    """The memory that a node changes in place."""


def run(model: nn.Module, graph: fx.Graph, inputs: Sequence[fx.Node], input: InputSpec) -> Run:
    """Return what each node of the graph does. Raises ModelError if the model does not accept the inputs."""
    with tried_out(model):
        model.eval()
        one, two = (_run(model, graph, inputs, input, batch) for batch in (1, 2))
    results: dict[fx.Node, Result] = {}
    for node, value in one.found.items():
        found = _compare(value, two.found[node])
        # What is computed from the number of rows may be the same for both batches, and differ for larger ones.
        counted = node.target is not operator.getitem and any(
            results[source] is None and _is_plain(one.found[source]) for source in node.all_input_nodes
        )
        results[node] = None if counted and isinstance(found, Static) else found
    return Run(results, two.memory, two.changes)


def _compare(one: Any, two: Any) -> Result:
    """Return what a node results in, having seen it for batches of 1 and 2."""
    if isinstance(one, _Shape) and isinstance(two, _Shape):
        same = one.dtype == two.dtype and one.shape[1:] == two.shape[1:]
        batch_first = (one.shape[:1], two.shape[:1]) == ((1,), (2,))
        return TensorSpec(one.shape[1:], one.dtype) if same and batch_first else None
    return Static(one) if _is_plain(one) and type(one) is type(two) and one == two else None


class _Shape:
    """Describes a tensor, which itself is not kept."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


_OPAQUE = object()  # stands for what is neither a tensor nor a constant


def _is_plain(value: Any) -> bool:
    """Return whether a value can be written into a graph as a constant."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str | torch.dtype | torch.device)


@dataclass
class _Seen:
    """Holds what was seen in one run."""

    found: dict[fx.Node, Any] = field(default_factory=dict)
    memory: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    changes: dict[fx.Node, frozenset[int]] = field(default_factory=dict)


def _run(model: nn.Module, graph: fx.Graph, inputs: Sequence[fx.Node], input: InputSpec, batch: int) -> _Seen:
    """Run the graph on a batch of zeros, with the parameters of one operation in memory at a time.

    It does not run on the meta device, whose Python kernels would load torch's compiler into every rank (70 MB).
    """
    fed = {
        node: torch.zeros(batch, *spec.shape, dtype=spec.dtype)
        for node, spec in zip(inputs, input.tensors, strict=True)
    }
    values: dict[fx.Node, Any] = {}
    seen = _Seen()
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
                shapes = " and ".join(str(list(tensor.shape)) for tensor in input.tensors)
                raise ModelError(
                    f"{type(model).__name__} does not accept inputs of shape {shapes} (fails at {node.target}): "
                    f"{error}. {input.advice}".rstrip()
                ) from error
        value = values[node]
        changed = [seen.memory[one] for one, versions in before.items() if _versions(values[one]) != versions]
        if changed:
            seen.changes[node] = frozenset().union(*changed)
        places = _storages(value)
        shared = [seen.memory[one] for one in node.all_input_nodes if places & _storages(values[one])]
        seen.memory[node] = frozenset((number,)).union(*shared)
        seen.found[node] = _Shape(value) if isinstance(value, Tensor) else _OPAQUE if _tensors(value) else value
        for source in [*node.all_input_nodes, node]:
            if last_use.get(source, source) is node:
                values.pop(source, None)
    return seen


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors that an operation returned: one, or a sequence or mapping of them."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def _versions(value: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(value)]


def _storages(value: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in _tensors(value)}


def _result(model: nn.Module, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Return what one operation returns."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(model)
        return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) and value.is_meta else value
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        tensors = {
            name: torch.zeros(tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        }
        return torch.func.functional_call(module, tensors, args, kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
