"""Records a model's forward pass as a graph that is the same in training and evaluation.

Each submodule that cannot be traced becomes one node, which runs the module itself.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizonml.errors import ModelError, is_out_of_memory
from horizonml.machine.code import where
from horizonml.models.in_place import changed_by


class Untraceable(ModelError):
    """A model's forward pass cannot be recorded as a graph."""


class _Hidden(Exception):
    """A module's forward does something that a graph would not show: the module must stay in one piece."""

    def __init__(self, module: str, what: str) -> None:
        super().__init__(what)
        self.module = module


class _Tracer(fx.Tracer):
    """Traces down to PyTorch's own layers, and does not trace into the modules named in `leaves`.

    Buffers are recorded like parameters, and not read.

    A graph does not show that operations are within `torch.no_grad()` or `torch.autocast()`, so it raises _Hidden.
    """

    proxy_buffer_attributes = True

    def __init__(self, leaves: set[str]) -> None:
        super().__init__()
        self._leaves = leaves
        self._context = _context()
        self._entered = [""]  # the modules, from the outermost, that were called in the model's own context

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        unchanged = _context() == self._context
        if unchanged:
            self._entered.append(self.path_of_module(m))
        result = super().call_module(m, forward, args, kwargs)
        if unchanged:
            self._entered.pop()
        return result

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if _context() != self._context:
            raise _Hidden(self._entered[-1], "it switches gradients or autocast on or off")
        return super().create_node(kind, *args, **kwargs)


def _context() -> tuple[Any, ...]:
    """Return what decides, beside its inputs, on what an operation does."""
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dtype


def trace(model: nn.Module, names: Sequence[str] = ()) -> fx.Graph:
    """Return the model's graph, which is the same in training and evaluation. Raises Untraceable.

    `names` are those of the forward's arguments that the data provides; without any, it is the first. Other arguments
    keep their defaults.

    A submodule becomes one node that runs the module itself if its forward cannot be traced (it branches on its input),
    if its graph would depend on the current mode (it reads `self.training`), or if the graph would not show all of what
    it does (it changes its buffers, or switches gradients off).
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
    tensors = _Tensors(model)
    try:
        graph = tracer.trace(model, defaults or None)
        for changed in (tensors.changed(), _written(model, graph)):
            if changed is not None:
                raise _Hidden(changed, "it changes its own parameters or buffers")
        _drop_checks(graph, defaults)
        return graph
    except Exception as error:  # the model's own code runs here, on proxies, and may fail in any way
        if is_out_of_memory(error):
            raise
        stack = list(tracer.module_stack.values())
        culprit = error.module if isinstance(error, _Hidden) else stack[-1][0] if stack else ""
        if not culprit or culprit in leaves:
            raise Untraceable(
                f"{type(model).__name__} cannot be cut into layers: {where(error)}. Its forward must take one tensor "
                "and not branch on its values; parts that do can be moved into a submodule."
            ) from error
        leaves.add(culprit)
        return None
    finally:
        tensors.restore()


def _written(model: nn.Module, graph: fx.Graph) -> str | None:
    """Return the path of a module that changes a parameter or buffer in place, or None."""
    for node in graph.nodes:
        changed = changed_by(model, node)
        if changed is not None and changed.op == "get_attr":
            return _innermost(node)
    return None


def _innermost(node: fx.Node) -> str:
    """Return the path of the module whose forward contains an operation; "" stands for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


class _Tensors:
    """Remembers the parameters and buffers of a model's modules, which a forward may change or replace."""

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[str, dict[str, Any], str, Tensor | None, int]] = [
            (path, registry, name, tensor, 0 if tensor is None else tensor._version)
            for path, module in model.named_modules()
            for registry in (module._parameters, module._buffers)
            for name, tensor in registry.items()
        ]

    def changed(self) -> str | None:
        """Return the path of a module of which a tensor has changed, or None."""
        for path, registry, name, tensor, version in self._held:
            now: Tensor | None = registry.get(name)
            if now is not tensor or (tensor is not None and tensor._version != version):
                return path
        return None

    def restore(self) -> None:
        """Put the tensors back: a forward that replaces one has put a proxy there."""
        for _, registry, name, tensor, _ in self._held:
            registry[name] = tensor


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
            return _innermost(one)
    return None if len(left.nodes) == len(right.nodes) else ""
