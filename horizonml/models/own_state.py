"""Watches what the user's own code keeps in objects of its own: in globals, class attributes, closures and modules.

A model's forward may read and change them. Trying it out must not, and stages in several processes do not share them.
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import gc
import io
import itertools
import operator
import os
import random
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from types import CellType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from horizonml.machine.code import is_own_file, own_modules

_PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple)
_MOST_OBJECTS, _MOST_INSIDE = 3000, 1000  # that are looked at, from one value on, and in one container
_MOST_VALUES = 1 << 20  # of a tensor or array, of which copies are kept
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
# PyTorch keeps hooks for all modules in these.
_OF_PYTHON = ("builtins", "logging", "functools", "re", "abc", "typing")  # whose objects hold nothing, or caches only
_WITHOUT_STATE = ("torch", "torchvision", "numpy", "horizonml")
_HOOK_REGISTRIES = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip
_HOOKS = [name for name in vars(torch_modules) if name.startswith("_global_") and name.endswith("_hooks")]


@dataclass(frozen=True)
class _Kept:
    """Holds what one object held: `read` returns it now, `write` puts it back."""

    owner: Any
    held: Any
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None] = lambda owner, held: None

    @property
    def is_same(self) -> bool:
        return _are_same(self.read(self.owner), self.held)


def _are_same(one: Any, other: Any) -> bool:
    """Return whether two objects are one, or equal where nothing in them can be changed."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if isinstance(one, np.ndarray | Tensor):
        with torch._C.DisableTorchFunctionSubclass():  # stand-ins must not be read by a model's code, but here
            return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, float | complex) and one != one:
        return bool(other != other)
    return isinstance(one, (*_PLAIN, set, frozenset)) and bool(one == other)


def _refill(owner: Any, held: Any) -> None:
    owner.clear()
    (owner.extend if isinstance(owner, list | deque) else owner.update)(held)


def _draws_on(owner: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]]:
    """Return how the state of a random number generator is read and written."""
    if isinstance(owner, random.Random):
        return lambda one: one.getstate(), lambda one, state: one.setstate(state)
    if isinstance(owner, np.random.Generator):
        return lambda one: one.bit_generator.state, lambda one, state: setattr(one.bit_generator, "state", state)
    return lambda one: one.get_state(), lambda one, state: one.set_state(state)


def _write_cell(cell: CellType, held: tuple[Any, ...]) -> None:
    if held:
        cell.cell_contents = held[0]


def _read_cell(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing was assigned yet
        return ()


def _slots(owner: Any) -> list[str]:
    names = (name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ()))
    return [name for name in names if not name.startswith("__")]


def _read_object(owner: Any) -> dict[str, object]:
    return {**getattr(owner, "__dict__", {}), **{name: getattr(owner, name, None) for name in _slots(owner)}}


def _write_object(owner: Any, held: dict[str, object]) -> None:
    own = getattr(owner, "__dict__", None)
    if own is not None:
        slots = set(_slots(owner))
        own.clear()
        own.update({name: value for name, value in held.items() if name not in slots})
    for name in _slots(owner):
        setattr(owner, name, held[name])


@functools.cache
def is_own(kind: type) -> bool:
    """Return whether objects of a class may hold state of the user's: not those of PyTorch and of this package."""
    top = kind.__module__.partition(".")[0]
    if kind.__module__.startswith("torch.optim.") or (top not in _WITHOUT_STATE and top not in sys.stdlib_module_names):
        return True
    if is_dataclass(kind) or (top in sys.stdlib_module_names and top not in _OF_PYTHON):
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and is_own_file(file))


def _kept(owner: Any) -> tuple[_Kept | None, Iterable[Any]]:
    """Return what an object holds that code may change in place, and the objects in it."""
    attributes: list[Any] = (
        [vars(owner)] if isinstance(owner, list | deque | dict | set) and hasattr(owner, "__dict__") else []
    )
    if isinstance(owner, list | deque):
        return _Kept(owner, list(owner), list, _refill), [*owner, *attributes]
    if isinstance(owner, dict):
        return _Kept(owner, dict(owner), dict, _refill), [*owner.values(), *attributes]
    if isinstance(owner, set):
        return _Kept(owner, set(owner), set, _refill), attributes
    if isinstance(owner, tuple):
        return None, owner
    if isinstance(owner, Tensor):
        if owner.is_inference():
            return None, ()
        if owner.is_meta or owner.numel() > _MOST_VALUES:
            return _Kept(owner, owner._version, lambda one: one._version), ()
        return _Kept(
            owner, owner.detach().clone(), lambda one: one.detach(), lambda one, held: one.data.copy_(held)
        ), ()
    if isinstance(owner, np.ndarray):
        if owner.size > _MOST_VALUES or owner.dtype.hasobject:
            return None, ()
        return _Kept(owner, owner.copy(), lambda one: one, lambda one, held: np.copyto(one, held)), ()
    if isinstance(owner, _GENERATORS):
        read, write = _draws_on(owner)
        return _Kept(owner, read(owner), read, write), ()
    if isinstance(owner, FunctionType):
        if not is_own_file(owner.__code__.co_filename):
            return None, ()
        defaults = *(owner.__defaults__ or ()), *(owner.__kwdefaults__ or {}).values()
        inside = [*owner.__dict__.values(), *(owner.__closure__ or ()), *defaults]
        return _Kept(owner.__dict__, dict(owner.__dict__), dict, _refill), inside
    if isinstance(owner, functools._lru_cache_wrapper):
        return None, gc.get_referents(owner)  # what it has returned before
    if isinstance(owner, CellType):
        content = _read_cell(owner)
        return _Kept(owner, content, _read_cell, _write_cell), content
    if isinstance(owner, MethodType):
        return None, (owner.__self__, owner.__func__)
    if isinstance(owner, functools.partial):
        return None, (owner.func, *owner.args, *owner.keywords.values())
    if isinstance(owner, io.StringIO | io.BytesIO):
        return _Kept(owner, owner.getvalue(), lambda one: one.getvalue()), ()
    if isinstance(owner, bytearray | array.array | ctypes._SimpleCData | ctypes.Array | ctypes.Structure):
        return _Kept(owner, bytes(owner), bytes, _write_bytes), ()
    if isinstance(owner, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
        return _Kept(owner, dict(owner.items()), lambda one: dict(one.items())), [*owner.values()]
    if isinstance(owner, GeneratorType):
        return _Kept(owner, _position(owner), _position), ()
    if hasattr(type(owner), "__next__") and not hasattr(owner, "__dict__"):
        return _Kept(owner, _left(owner), _left), ()
    if isinstance(owner, type) or not (isinstance(owner, nn.Module) or is_own(owner.__class__)):
        return None, ()
    held = _read_object(owner)
    return _Kept(owner, held, _read_object, _write_object), held.values()


def _write_bytes(owner: Any, held: bytes) -> None:
    if isinstance(owner, bytearray):
        owner[:] = held
    elif len(bytes(owner)) == len(held):
        memoryview(owner).cast("B")[:] = held


def _position(generator: Any) -> tuple[Any, ...]:
    """Return where a generator is, and the plain values that it holds there."""
    frame = generator.gi_frame
    return () if frame is None else (frame.f_lasti, *map(repr, frame.f_locals.items()))


def _left(iterator: Any) -> tuple[Any, ...]:
    """Return what tells how far an iterator is: how much it has left, and what it is made of, where it shows that."""
    parts: Any = ()
    if type(iterator).__module__ in ("itertools", "builtins"):
        with suppress(TypeError, AttributeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # itertools will no longer show it some day
            parts = iterator.__reduce__()[1:]
    inside = [one for part in parts if isinstance(part, tuple) for one in part]
    shown = [_left(one) if hasattr(one, "__next__") else repr(one)[:1000] for one in inside]
    return operator.length_hint(iterator, -1), *shown


class _Contents:
    """Remembers all that can be reached from a value and may be changed in place."""

    def __init__(self, value: Any, skip: Set[int], seen: set[int] | None) -> None:
        self.kept: list[_Kept] = []
        self.met: set[int] = set()  # of what is skipped
        seen = set() if seen is None else seen
        waiting, left = deque([value]), _MOST_OBJECTS
        while waiting and left:
            owner = waiting.popleft()
            if id(owner) in skip:
                self.met.add(id(owner))
            if isinstance(owner, _PLAIN[:-1]) or id(owner) in skip or id(owner) in seen:
                continue
            seen.add(id(owner))
            left -= 1
            kept, inside = _kept(owner)
            if kept is not None:
                self.kept.append(kept)
            inside = list(inside)
            waiting.extend(inside if len(inside) <= _MOST_INSIDE else ())


def reached(value: Any, skip: Set[int]) -> set[int]:
    """Return by `id` what code may change in place of a value, and what it reaches of `skip`."""
    contents = _Contents(value, skip, None)
    return {id(one.owner) for one in contents.kept} | contents.met


def copy_of(value: Any, skip: Set[int] = frozenset(), seen: set[int] | None = None) -> _Contents | None:
    """Return what code may change in place of a value, or None if there is nothing of that kind.

    Objects whose `id` is in `skip` or `seen` are left out; those that are looked at are added to `seen`.
    """
    if isinstance(value, _PLAIN[:-1]):
        return None
    contents = _Contents(value, skip, seen)
    return contents if contents.kept else None


def is_same(now: Any, value: Any, copy: _Contents | None) -> bool:
    """Return whether a value is what it was, when it was `value` and `copy` was made of it."""
    if now is not value:
        return not isinstance(now, Tensor | np.ndarray) and _are_same(now, value)
    return copy is None or all(one.is_same for one in copy.kept)


def put_back(copy: _Contents | None) -> None:
    """Give all objects what they held when `copy` was made of them."""
    for one in copy.kept if copy is not None else ():
        if not one.is_same:
            one.write(one.owner, one.held)


def draws(copy: _Contents | None) -> bool:
    """Return whether numbers were drawn from a random number generator since `copy` was made."""
    return copy is not None and any(isinstance(one.owner, _GENERATORS) and not one.is_same for one in copy.kept)


def described(value: Any, depth: int = 6) -> Any:
    """Return a value as plain values, tensors and containers of these, so that two can be compared."""
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return value.detach().clone().as_subclass(Tensor)
    if isinstance(value, _PLAIN[:-1]) or depth == 0:
        return value if isinstance(value, _PLAIN[:-1]) else type(value).__qualname__
    if isinstance(value, np.ndarray):
        return value.tolist() if value.size <= _MOST_INSIDE else hash(value.tobytes())
    if isinstance(value, dict):
        return {str(key): described(inside, depth - 1) for key, inside in list(value.items())[:_MOST_INSIDE]}
    if isinstance(value, list | tuple | deque):
        return [described(inside, depth - 1) for inside in list(value)[:_MOST_INSIDE]]
    if isinstance(value, set):
        return sorted(map(repr, value))
    if isinstance(value, nn.Module):
        return type(value).__qualname__
    kept, _ = _kept(value)
    return described(kept.held, depth - 1) if kept is not None else type(value).__qualname__


class OwnState:
    """Remembers the globals of the user's own modules, the attributes of their classes, and the context.

    These are the modules in which the classes and functions of a model are defined, and those that their code names.
    """

    def __init__(self, model: nn.Module | None = None, module: str = "") -> None:
        """Remember what a model's code can reach, or what that of a module by name can."""
        kinds = {kind for inner in model.modules() for kind in type(inner).__mro__} if model is not None else set()
        hooks = {name: vars(torch_modules)[name] for name in _HOOKS}
        spaces: dict[int, tuple[str, Any, Any]] = {}
        attributes = (value for inner in model.modules() for value in vars(inner).values()) if model is not None else ()
        for own in _own_modules([module, *_homes([*kinds, *attributes, *hooks.values()])]):
            spaces[id(own)] = own.__name__, own, vars(own)
            waiting: list[tuple[str, Any]] = [(own.__name__, own)]
            while waiting:  # classes, and those in classes
                place, space = waiting.pop()
                for name, value in list(vars(space).items()):
                    if isinstance(value, type) and value.__module__ == own.__name__ and id(value) not in spaces:
                        spaces[id(value)] = f"{place}.{name}", value, vars(value)
                        waiting.append((f"{place}.{name}", value))
        for kind in kinds:
            if is_own(kind):
                spaces.setdefault(id(kind), (kind.__qualname__, kind, vars(kind)))
        registered = SimpleNamespace(**(_hooks_of(model) if model is not None else {}))
        skip = set(map(id, parts_of(model))) if model is not None else set()
        seen: set[int] = set()  # what several names share is looked at once
        self._held = [
            (
                place,
                owner,
                {name: (value, copy_of(value, skip, seen)) for name, value in space.items() if _counts(name)},
            )
            for place, owner, space in [
                *spaces.values(),
                ("torch", torch_modules, hooks),
                ("", registered, vars(registered)),
            ]
        ]
        self._environment = copy_of(os.environ._data)  # type: ignore[attr-defined]
        self._context = dict(contextvars.copy_context().items())

    def changed(self) -> list[str]:
        """Return the names of what has changed."""
        found = [
            ".".join(filter(None, (place, name)))
            for place, owner, before in self._held
            for name, value in vars(owner).items()
            if _counts(name) and (owner is not torch_modules or name in before)
            if not (name in before and is_same(value, *before[name])) and _is_state(value)
        ]
        if not is_same(None, None, self._environment):
            found.append("os.environ")
        context = contextvars.copy_context()
        return found + [var.name for var, value in context.items() if not is_same(value, self._context.get(var), None)]

    def keep_changes(self) -> None:
        """Forget all but what has changed since, so that `restore` later puts back nothing else."""
        for _, owner, before in self._held:
            for name, (value, copy) in list(before.items()):
                if is_same(vars(owner).get(name), value, copy):
                    del before[name]
                elif copy is not None:
                    copy.kept = [one for one in copy.kept if not one.is_same]
        self._environment = None

    def restore(self) -> None:
        """Put back what has changed, apart from the context, which whoever has set it resets."""
        for _, owner, before in self._held:
            for name, (value, copy) in before.items():
                put_back(copy)
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
        put_back(self._environment)


@torch.no_grad()
def put_back_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a module's buffers these values, by name; one that has changed its shape is replaced."""
    for name, value in values.items():
        path, _, last = name.rpartition(".")
        buffers = module.get_submodule(path)._buffers
        now = buffers.get(last)
        if now is not None and now.shape == value.shape and now.dtype == value.dtype:
            now.detach().copy_(value)
        else:
            buffers[last] = value.clone()


def _own_modules(names: Iterable[str]) -> list[ModuleType]:
    """Return the user's own modules of these names, and those that the code in them names, in turn."""
    own, _ = own_modules()
    found: dict[str, ModuleType] = {}
    waiting = deque(names)
    while waiting:
        name = waiting.popleft()
        if name not in own or name in found:
            continue
        found[name] = own[name]
        values = list(vars(own[name]).values())
        waiting.extend(_homes(values))
        package = getattr(own[name], "__package__", None) or ""
        for kind in [value for value in values if isinstance(value, type) and value.__module__ == name]:
            values += vars(kind).values()
        for word in {word for value in values for word in _words_of(value)}:
            waiting.extend((word, f"{package}.{word}"))
    return list(found.values())


def _homes(values: Iterable[Any], depth: int = 3) -> Iterator[str]:
    """Yield the names of the modules in which values, and those in containers, are defined."""
    for value in values:
        if isinstance(value, ModuleType):
            yield value.__name__
        elif isinstance(value, functools.partial):
            yield from _homes([value.func, *value.args, *value.keywords.values()], depth - 1)
        elif isinstance(value, dict | list | tuple | set | deque) and depth:
            inside = value.values() if isinstance(value, dict) else value
            yield from _homes([*inside][:_MOST_INSIDE], depth - 1)
        else:
            code = isinstance(value, type | FunctionType | MethodType)
            yield str(value.__module__ if code else type(value).__module__)


def _words_of(value: Any) -> Iterator[str]:
    """Yield the names and texts in the code of a function, and of those in it: what it imports is among them."""
    if isinstance(value, property):
        for one in (value.fget, value.fset):
            yield from _words_of(one)
    # Other values may be of kinds whose attributes cannot be looked at, such as `torch.classes`.
    inner = value.__func__ if isinstance(value, MethodType | classmethod | staticmethod) else value
    code = inner.__code__ if isinstance(inner, FunctionType) else inner
    if isinstance(code, CodeType):
        yield from code.co_names
        for constant in code.co_consts:
            yield from [constant] if isinstance(constant, str) else _words_of(constant)


def parts_of(model: nn.Module) -> Iterator[Any]:
    """Yield a model's modules, and what these register: what is watched elsewhere."""
    for module in model.modules():
        yield module
        yield from (module._parameters, module._buffers, module._modules)
        yield from (*module._parameters.values(), *module._buffers.values())


def _hooks_of(model: nn.Module) -> dict[str, FunctionType]:
    """Return the functions that are hooks of a model's modules and parameters, by words for them.

    What these remember outside of the model, every copy of the model shares.
    """
    owners = itertools.chain(model.named_modules(), model.named_parameters())
    return {
        f"a hook of {path or type(owner).__name__} ({number})": hook
        for path, owner in owners
        for registry in _HOOK_REGISTRIES
        for number, hook in enumerate((getattr(owner, registry, None) or {}).values())
        if isinstance(hook, FunctionType)
    }


def _counts(name: str) -> bool:
    return not (name.startswith("__") and name.endswith("__"))


def _is_state(value: Any) -> bool:
    """Return whether a value is neither a class nor a module of code."""
    return not isinstance(value, type) and (isinstance(value, _PLAIN) or copy_of(value) is not None)


@contextmanager
def own_state_kept(model: nn.Module) -> Iterator[None]:
    """Let a model's code run without consequences for the user's own modules and classes."""
    state = OwnState(model)
    try:
        yield
    finally:
        state.restore()
