"""Finds out what each operation of a graph returns, from a run on zeros."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizonml.data.tensors import TensorSpec
from horizonml.errors import ModelError, is_out_of_memory
from horizonml.tasks.task import InputSpec


class Static:
    """Wraps a result that is not a tensor and does not depend on the batch, such as the height of an image."""

    def __init__(self, value: Any) -> None:
        self.value = value


Result = TensorSpec | Static | None
"""What an operation returns: a tensor with the batch in its first dimension, a constant, or anything else."""


def results(model: nn.Module, graph: fx.Graph, inputs: Sequence[fx.Node], input: InputSpec) -> dict[fx.Node, Result]:
    """Return what each node of the graph results in. Raises ModelError if the model does not accept the inputs."""
    training = model.training
    model.eval()
    try:
        one, two = (_run(model, graph, inputs, input, batch) for batch in (1, 2))
    finally:
        model.train(training)
    return {node: _compare(one[node], two[node]) for node in one}


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


def _run(
    model: nn.Module, graph: fx.Graph, inputs: Sequence[fx.Node], input: InputSpec, batch: int
) -> dict[fx.Node, Any]:
    """Run the graph on a batch of zeros, with the parameters of one operation in memory at a time.

    It does not run on the meta device, whose Python kernels would load torch's compiler into every rank (70 MB).
    """
    fed = {
        node: torch.zeros(batch, *spec.shape, dtype=spec.dtype)
        for node, spec in zip(inputs, input.tensors, strict=True)
    }
    values: dict[fx.Node, Any] = {}
    found: dict[fx.Node, Any] = {}
    last_use = {source: node for node in graph.nodes for source in node.all_input_nodes}
    for node in graph.nodes:
        if node.op == "output":
            break
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
        found[node] = _Shape(value) if isinstance(value, Tensor) else value
        for source in node.all_input_nodes:
            if last_use[source] is node:
                values.pop(source, None)
    return {node: _OPAQUE if _holds_tensors(value) else value for node, value in found.items()}


def _result(model: nn.Module, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Return what one operation returns."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(model)
        return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) and value.is_meta else value
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        tensors = {
            name: torch.zeros(tensor.shape, dtype=tensor.dtype)
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        }
        return torch.func.functional_call(module, tensors, args, kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _holds_tensors(value: Any) -> bool:
    """Return whether a collection holds tensors, which must not outlive the run."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(map(_holds_tensors, value)))
