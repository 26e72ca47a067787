"""Records a model's forward pass as a graph that is the same in training and evaluation.

Each submodule that cannot be traced, or whose Python does what a graph does not show, becomes one node, which runs the
module itself.

Tells which operations of a model's graph may change a tensor in place.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from horizonml.data.sampler import python_seeded, python_state
from horizonml.errors import ModelError, is_out_of_memory
from horizonml.machine.code import where
from horizonml.models.own_state import copy_of, draws, is_same, own_state_kept, parts_of, put_back
from horizonml.text import some


class Untraceable(ModelError):
    """A model's forward pass cannot be recorded as a graph."""


class MadeLater(ModelError):
    """A forward makes parameters or buffers that are not there once the model has been constructed."""


class _Hidden(Exception):
    """A module's forward does something that a graph would not show: the module must stay in one piece."""

    def __init__(self, module: str, what: str) -> None:
        super().__init__(what)
        self.module = module


class _Proxy(fx.Proxy):
    """Stands for a tensor in a forward that is recorded, and takes note where the forward reads it."""

    def _read(self, what: str) -> Any:
        assert isinstance(self.tracer, _Tracer)
        raise self.tracer.refuse(f"it reads a value back from a tensor as {what}")

    def __float__(self) -> float:
        return float(self._read("a number"))

    def __int__(self) -> int:
        return int(self._read("a number"))

    def __index__(self) -> int:
        return int(self._read("a number"))

    def __len__(self) -> int:
        return int(self._read("a length, by 'len'"))

    def __hash__(self) -> int:
        return int(self._read("a key"))


class _Tracer(fx.Tracer):
    """Traces down to PyTorch's own layers, and does not trace into the modules named in `leaves`.

    Buffers are recorded like parameters, and not read.

    A graph does not show hooks, nor that operations are within `torch.no_grad()` or `torch.autocast()`, nor what Python
    draws from its own random numbers. Modules with hooks are not traced into; for the rest, it raises _Hidden.
    """

    proxy_buffer_attributes = True

    def __init__(self, leaves: set[str]) -> None:
        super().__init__()
        self._leaves = leaves
        self._context = _context()
        self._entered = [""]  # the modules, from the outermost, that were called in the model's own context
        self.refused: _Hidden | None = None  # also where the model's own code has caught the error

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves or has_hooks(m) or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        raise self.refuse("it branches on the value of a tensor")

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        try:
            return super().iter(obj)
        except fx.proxy.TraceError as error:
            raise self.refuse("it goes through a tensor value by value") from error

    def refuse(self, what: str) -> _Hidden:
        """Return the error that says that a graph cannot show what the module under way does."""
        self.refused = self.refused or _Hidden(self.inside, what)
        return self.refused

    @property
    def inside(self) -> str:
        """Return the path of the module whose forward is under way."""
        stack = list(self.module_stack.values())
        return stack[-1][0] if stack else ""

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, object]
    ) -> Any:
        unchanged = _context() == self._context
        if unchanged:
            self._entered.append(self.path_of_module(m))
        before = _draws()
        result = super().call_module(m, forward, args, kwargs)
        if _draws() != before:
            raise _Hidden(self.path_of_module(m), _DRAWS)
        if unchanged:
            self._entered.pop()
        return result

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if _context() != self._context:
            raise _Hidden(self._entered[-1], "it switches gradients or autocast on or off")
        return super().create_node(kind, *args, **kwargs)


_DRAWS = "it draws random numbers, and Python decides on them"


def _draws() -> tuple[Any, ...]:
    """Return the state of all generators: operations of a graph do not draw while it is recorded."""
    return *python_state(), bytes(torch.get_rng_state().numpy())


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, which run when it is called and which a graph does not show."""
    return any(module.__dict__.get(name) for name in _HOOKS)


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
    defaults = _defaults(model, names)
    while True:
        graphs: list[fx.Graph] = []
        for mode, gradients in ((True, True), (False, True), (False, False)):
            with torch.set_grad_enabled(gradients), tried_out(model):
                model.train(mode)
                graph = _trace_once(model, leaves, defaults)
            if graph is None:
                break
            graphs.append(graph)
        else:
            train, *others = graphs
            found = [one for other in others if (one := _first_difference(train, other, leaves)) is not None]
            if not found:
                return train
            if not found[0]:
                raise Untraceable(
                    f"the forward of {type(model).__name__} itself depends on train/eval mode, or on whether "
                    "gradients are computed; move that part into a submodule, so that the model can be cut into layers"
                )
            leaves.add(found[0])


def _defaults(model: nn.Module, names: Sequence[str]) -> dict[str, object]:
    """Return the default values of the forward's arguments that the data does not provide."""
    arguments = list(inspect.signature(model.forward).parameters.values())
    given = set(names or [argument.name for argument in arguments[:1]])
    return {
        argument.name: argument.default
        for argument in arguments
        if argument.name not in given and argument.default is not argument.empty
    }


def _trace_once(model: nn.Module, leaves: set[str], defaults: dict[str, object]) -> fx.Graph | None:
    """Trace once; return None, and add a leaf, if a submodule prevented the trace."""
    tracer = _Tracer(leaves)
    tensors, attributes, before = _Tensors(model), Attributes(model), _draws()
    try:
        graph = tracer.trace(model, defaults or None)
        if tracer.refused is not None:  # and the model's own code has caught it
            raise tracer.refused
        for changed in (tensors.changed(), _written(model, graph)):
            if changed is not None:
                raise _Hidden(changed, "it changes its own parameters or buffers")
        for path, names in attributes.changed().items():
            raise _Hidden(path, f"it sets {some(sorted(names))}")
        if _draws() != before:
            raise _Hidden("", _DRAWS)
        _drop_checks(graph, defaults)
        return graph
    except Exception as error:  # the model's own code runs here, on proxies, and may fail in any way
        if is_out_of_memory(error):
            raise
        stack = list(tracer.module_stack.values())
        culprit = error.module if isinstance(error, _Hidden) else stack[-1][0] if stack else ""
        if not culprit or culprit in leaves:
            reason = where(error).replace(f"{_Hidden.__name__}: ", "")
            raise Untraceable(
                f"{type(model).__name__} cannot be cut into layers: {reason}. Its forward must take one tensor "
                "and not branch on its values; parts that do can be moved into a submodule."
            ) from error
        leaves.add(culprit)
        return None
    finally:
        tensors.restore()
        attributes.restore()


def _written(model: nn.Module, graph: fx.Graph) -> str | None:
    """Return the path of a module that changes a parameter or buffer in place, or None."""
    for node in graph.nodes:
        changed = changed_by(model, node)
        while changed is not None and changed.op != "get_attr":
            changed = viewed_by(changed)
        if changed is not None:
            return _innermost(node)
    return None


def _innermost(node: fx.Node) -> str:
    """Return the path of the module whose forward contains an operation; "" stands for the model itself."""
    stack = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    if node.op == "call_module" and stack and stack[-1] == node.target:
        stack.pop()
    return stack[-1] if stack else ""


class Attributes:
    """Remembers what a model's modules hold beside parameters, buffers and modules: whatever their code has set."""

    _OWN = frozenset(nn.Module().__dict__)  # what every module has

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        """Remember the attributes of all modules; `prefix` goes before their paths."""
        skip = frozenset(map(id, parts_of(model)))
        self._held = [
            (
                f"{prefix}.{path}".strip("."),
                module,
                {n: (value, copy_of(value, skip)) for n, value in module.__dict__.items() if n not in self._OWN},
            )
            for path, module in model.named_modules()
        ]

    def changed(self) -> dict[str, dict[str, object]]:
        """Return the attributes that are new or have changed, with their values, by the path of their module."""
        found: dict[str, dict[str, object]] = {}
        for path, module, before in self._held:
            for name, value in module.__dict__.items():
                if name in self._OWN or (name in before and is_same(value, *before[name])):
                    continue
                found.setdefault(path, {})[name] = value
        return found

    def drawn(self) -> list[tuple[str, str]]:
        """Return the modules' own random number generators from which numbers were drawn: their paths and names."""
        return [(path, name) for path, _, before in self._held for name, (_, copy) in before.items() if draws(copy)]

    def restore(self) -> None:
        """Put everything back."""
        for _, module, before in self._held:
            for name in [name for name in module.__dict__ if name not in self._OWN and name not in before]:
                del module.__dict__[name]
            for name, (value, copy) in before.items():
                put_back(copy)
                module.__dict__[name] = value


@contextmanager
def tried_out(model: nn.Module) -> Iterator[None]:
    """Let a model run without consequences: its modes and attributes are as before afterwards. Raises MadeLater."""
    modes, attributes = [(module, module.training) for module in model.modules()], Attributes(model)
    try:
        with nothing_made(model), own_state_kept(model), torch.random.fork_rng(devices=[]), python_seeded(0):
            torch.default_generator.manual_seed(0)  # all ranks must see the same
            yield
    finally:
        attributes.restore()
        for module, mode in modes:
            module.training = mode


@contextmanager
def nothing_made(model: nn.Module) -> Iterator[None]:
    """Raise MadeLater if a model makes modules or buffers, which checkpoints and other stages would not have."""
    registered = [(path, module, _registered(module)) for path, module in model.named_modules()]
    try:
        yield
    finally:
        made = [(path, one) for path, module, before in registered for one in _taken_away(module, before)]
        if made:
            name = ".".join(filter(None, made[0]))
            raise MadeLater(
                f"the forward of {type(model).__name__} makes {name} when it is first called; make it in the "
                "constructor, so that checkpoints have it and every device makes the same"
            )


def _registered(module: nn.Module) -> tuple[dict[str, object], ...]:
    return dict(module._modules), dict(module._buffers)


def _taken_away(module: nn.Module, before: Sequence[dict[str, object]]) -> list[str]:
    """Remove the modules and buffers of a module that were not there before, and return their names."""
    found = []
    registries: tuple[dict[str, Any], ...] = (module._modules, module._buffers)
    for names, held in zip(registries, before, strict=True):
        for name in [name for name, one in names.items() if one is not None and held.get(name) is None]:
            made = names.pop(name)
            if name in held:
                names[name] = None
            if isinstance(made, Tensor) or made.state_dict():
                found.append(name)
    return found


class _Tensors:
    """Remembers the parameters and buffers of a model's modules, which a forward may change or replace."""

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[str, dict[str, Any], str, Tensor | None, Tensor | None, int]] = [
            (path, registry, name, tensor, None if tensor is None else tensor.detach(), _version(tensor))
            for path, module in model.named_modules()
            for registry in (module._parameters, module._buffers)
            for name, tensor in registry.items()
        ]
        registries = (registry for module in model.modules() for registry in (module._parameters, module._buffers))
        self._names = [(registry, set(registry)) for registry in registries]

    def changed(self) -> str | None:
        """Return the path of a module of which a tensor has changed, or None."""
        for path, registry, name, tensor, data, version in self._held:
            now: Tensor | None = registry.get(name)
            if now is not tensor or _version(tensor) != version or not _is_in(tensor, data):
                return path
        return None

    def restore(self) -> None:
        """Put the tensors back: a forward that replaces one, or its `data`, has put something else there."""
        for _, registry, name, tensor, data, _ in self._held:
            registry[name] = tensor
            if tensor is not None and data is not None and not _is_in(tensor, data):
                tensor.data = data
        for registry, names in self._names:
            for name in registry.keys() - names:
                del registry[name]


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor._version


def _is_in(tensor: Tensor | None, data: Tensor | None) -> bool:
    """Return whether a tensor lies in the memory of another one."""
    if tensor is None or data is None:
        return tensor is data
    return bool(tensor.untyped_storage()._cdata == data.untyped_storage()._cdata)


def _drop_checks(graph: fx.Graph, defaults: dict[str, object]) -> None:
    """Drop the operations with which fx checks at run time that arguments have their defaults."""
    mine = re.compile(rf"({'|'.join(map(re.escape, defaults)) or '(?!)'})_\d+")
    for node in graph.nodes:
        if node.op == "placeholder" and mine.fullmatch(str(node.target)):
            for user in list(node.users):
                for check in list(user.users):
                    graph.erase_node(check)
                graph.erase_node(user)


def _first_difference(left: fx.Graph, right: fx.Graph, leaves: Collection[str]) -> str | None:
    """Return the module within which two graphs begin to differ, or None; "" stands for the model itself.

    Modules in `leaves` are nodes already, and cannot be the cause.
    """
    for one, other in itertools.zip_longest(left.nodes, right.nodes):
        if one is not None and other is not None and _described(one) == _described(other):
            continue
        within = [_innermost(node) for node in (one, other) if node is not None]
        return max((path for path in within if path not in leaves), key=len, default="")
    return None


def _described(node: fx.Node) -> tuple[str, ...]:
    return node.op, str(node.target), str(node.args), str(node.kwargs)


_OPERATORS = frozenset(
    getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "imatmul", "ipow", "setitem")
)
_METHODS = frozenset(("__setitem__",))
_VIEWS = frozenset((
    "getattr", "getitem", "__getitem__", "detach", "view", "view_as", "reshape", "reshape_as", "flatten",
    "unflatten", "ravel", "t", "transpose", "swapaxes", "swapdims", "movedim", "permute", "squeeze",
    "unsqueeze", "narrow", "select", "expand", "expand_as", "diagonal", "chunk", "split", "unbind", "unfold",
    "contiguous", "to", "float",
))  # fmt: skip


def changed_by(model: nn.Module, node: fx.Node) -> fx.Node | None:
    """Return the tensor that an operation may change in place, as far as the operation's name tells, or None."""
    into = node.kwargs.get("out")
    if isinstance(into, fx.Node):
        return into
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    return node.args[0] if _changes(model, node) else None


def viewed_by(node: fx.Node) -> fx.Node | None:
    """Return the tensor in whose memory an operation's result may lie, as far as the operation's name tells, or None.

    So does `value.data`, of which PyTorch does not take note when it is changed.
    """
    if node.op not in ("call_method", "call_function") or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return node.args[0] if name in _VIEWS else None


def _changes(model: nn.Module, node: fx.Node) -> bool:
    """Return whether an operation may change its first argument."""
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return True
    return name in _METHODS or node.target in _OPERATORS or bool(node.kwargs.get("inplace", False))
