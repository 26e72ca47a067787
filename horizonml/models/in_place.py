"""Tells which operations of a model's graph may change a tensor in place."""

from __future__ import annotations

import operator

from torch import fx, nn

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
