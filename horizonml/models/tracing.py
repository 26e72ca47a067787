"""Records a model's forward pass as a graph that is the same in training and evaluation.

Each submodule that cannot be traced becomes one node, which runs the module itself.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from horizonml.errors import ModelError, is_out_of_memory
from horizonml.machine.code import where


class Untraceable(ModelError):
    """A model's forward pass cannot be recorded as a graph."""


class _Tracer(fx.Tracer):
    """Traces down to PyTorch's own layers, and does not trace into the modules named in `leaves`."""

    def __init__(self, leaves: set[str]) -> None:
        super().__init__()
        self._leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves or super().is_leaf_module(m, module_qualified_name)


def trace(model: nn.Module, names: Sequence[str] = ()) -> fx.Graph:
    """Return the model's graph, which is the same in training and evaluation. Raises Untraceable.

    `names` are those of the forward's arguments that the data provides; without any, it is the first. Other arguments
    keep their defaults.

    A submodule whose forward cannot be traced (it branches on its input), or whose graph would depend on the current
    mode (it reads `self.training`), becomes one node that runs the module itself.
    """
    leaves: set[str] = set()
    training, defaults = model.training, _defaults(model, names)
    try:
        while True:
            graphs = []
            for mode in (True, False):
                model.train(mode)
                graphs.append(_trace_once(model, leaves, defaults))
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
                    raise Untraceable(
                        f"the forward of {type(model).__name__} itself depends on train/eval mode; move that part "
                        "into a submodule, so that the model can be cut into layers"
                    )
                leaves.add(culprit)
    finally:
        model.train(training)


def _defaults(model: nn.Module, names: Sequence[str]) -> dict[str, Any]:
    """Return the default values of the forward's arguments that the data does not provide."""
    arguments = list(inspect.signature(model.forward).parameters.values())
    given = set(names or [argument.name for argument in arguments[:1]])
    return {
        argument.name: argument.default
        for argument in arguments
        if argument.name not in given and argument.default is not argument.empty
    }


def _trace_once(model: nn.Module, leaves: set[str], defaults: dict[str, Any]) -> fx.Graph | None:
    """Trace once; return None, and add a leaf, if a submodule prevented the trace."""
    tracer = _Tracer(leaves)
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        graph = tracer.trace(model, defaults or None)
        _drop_checks(graph, defaults)
        return graph
    except Exception as error:  # the model's own code runs here, on proxies, and may fail in any way
        if is_out_of_memory(error):
            raise
        stack = list(tracer.module_stack.values())
        if not stack or stack[-1][0] in leaves:
            raise Untraceable(
                f"{type(model).__name__} cannot be cut into layers: {where(error)}. Its forward must take one tensor "
                "and not branch on its values; parts that do can be moved into a submodule."
            ) from error
        leaves.add(stack[-1][0])
        return None
    finally:
        for module, held in buffers:  # a forward that replaces one has put a proxy there
            module._buffers.update(held)


def _drop_checks(graph: fx.Graph, defaults: dict[str, Any]) -> None:
    """Drop the operations with which fx checks at run time that arguments have their defaults."""
    mine = re.compile(rf"({'|'.join(map(re.escape, defaults)) or '(?!)'})_\d+")
    for node in graph.nodes:
        if node.op == "placeholder" and mine.fullmatch(str(node.target)):
            for user in list(node.users):
                for check in list(user.users):
                    graph.erase_node(check)
                graph.erase_node(user)


def _first_difference(left: fx.Graph, right: fx.Graph) -> str | None:
    """Return the innermost module at the first node in which two graphs differ; "" stands for the model itself."""
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
