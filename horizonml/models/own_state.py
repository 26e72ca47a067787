"""Watches what the user's own code keeps outside of models: the globals of its modules, and the attributes of classes.

A model's forward may read and change them. Trying it out must not, and stages in several processes do not share them.
"""

from __future__ import annotations

import contextvars
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from horizonml.machine.code import own_files

_PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple)
_CONTAINERS = (list, dict, OrderedDict, set, deque)
# PyTorch keeps hooks for all modules in these.
_HOOKS = [name for name in vars(torch_modules) if name.startswith("_global_") and name.endswith("_hooks")]


def copy_of(value: Any) -> Any:
    """Return a copy of what code may change in place of a value, or None if that is not known of its kind."""
    if type(value) in _CONTAINERS:
        return value.copy()
    return dict(vars(value)) if _is_record(value) else None


def _is_record(value: Any) -> bool:
    return isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type))


def is_same(now: Any, value: Any, copy: Any) -> bool:
    """Return whether a value is what it was, when it was `value` and `copy` was made of it."""
    if now is not value:
        if type(now) is not type(value) or not isinstance(now, _PLAIN):
            return False
        if isinstance(now, tuple):
            return len(now) == len(value) and all(is_same(one, two, None) for one, two in zip(now, value, strict=True))
        return bool(now == value)
    if copy is None:
        return True
    held = now if type(now) in _CONTAINERS else vars(now)
    if len(held) != len(copy):
        return False
    if isinstance(held, set):
        return bool(held == copy)
    pairs = ((held[key], copy.get(key)) for key in held) if isinstance(held, dict) else zip(held, copy, strict=True)
    return all(is_same(one, other, None) for one, other in pairs)


def put_back(value: Any, copy: Any) -> None:
    """Give a value what it held when `copy` was made of it."""
    if copy is None or is_same(value, value, copy):
        return
    held = value if type(value) in _CONTAINERS else vars(value)
    held.clear()
    if isinstance(held, list | deque):
        held.extend(copy)
    else:
        held.update(copy)


class OwnState:
    """Remembers the globals of the user's own modules, the attributes of their classes, and the context."""

    def __init__(self) -> None:
        """Remember them as they are."""
        files = set(map(str, own_files()))
        modules = [module for module in list(sys.modules.values()) if getattr(module, "__file__", None) in files]
        spaces: list[tuple[str, Any, Any]] = []
        for module in modules:
            spaces.append((module.__name__, module, vars(module)))
            for name, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == module.__name__:
                    spaces.append((f"{module.__name__}.{name}", value, vars(value)))
        self._held = [
            (place, owner, {name: (value, copy_of(value)) for name, value in space.items() if _counts(name, value)})
            for place, owner, space in spaces
        ]
        hooks = {name: vars(torch_modules)[name] for name in _HOOKS}
        self._held.append(("torch", torch_modules, {name: (value, copy_of(value)) for name, value in hooks.items()}))
        self._context = dict(contextvars.copy_context().items())

    def changed(self) -> list[str]:
        """Return the names of what has changed."""
        found = [
            f"{place}.{name}"
            for place, owner, before in self._held
            for name, value in vars(owner).items()
            if _counts(name, value) and (owner is not torch_modules or name in before)
            if not (name in before and is_same(value, *before[name]))
        ]
        context = contextvars.copy_context()
        return found + [var.name for var, value in context.items() if not is_same(value, self._context.get(var), None)]

    def restore(self) -> None:
        """Put back what has changed, apart from the context, which whoever has set it resets."""
        for _, owner, before in self._held:
            for name, (value, copy) in before.items():
                put_back(value, copy)
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)


def _counts(name: str, value: Any) -> bool:
    """Return whether a name may stand for state: neither Python's own, nor code."""
    if name.startswith("__") or isinstance(value, type | FunctionType | ModuleType | MappingProxyType | nn.Module):
        return False
    return isinstance(value, (*_PLAIN, *_CONTAINERS, Tensor)) or _is_record(value)


@contextmanager
def own_state_kept() -> Iterator[None]:
    """Let code run without consequences for the user's own modules and classes."""
    state = OwnState()
    try:
        yield
    finally:
        state.restore()
