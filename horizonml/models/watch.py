"""Watches, while a model trains in parts, what Python code in one part may change and that in another part reads.

A proof runs a few steps. What changes later, such as a setting that several blocks share, or a flag that a block sets
and the model's own forward reads, is noticed here: each part has its own copy, and only one of them would change.
"""

from __future__ import annotations

import dis
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from horizonml.errors import ModelError
from horizonml.machine.code import is_own_file
from horizonml.models.module_slice import ModuleSlice
from horizonml.models.own_state import copy_of, is_same, parts_of, reached
from horizonml.text import printable

_ONLY_ONCE = ("__init__", "reset_parameters", "extra_repr", "load_state_dict")  # which no step calls
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque)
_MOST_SHOWN = 100  # characters of a value
_OF_EVERY = frozenset(nn.Module().__dict__)  # the attributes of every module
_FEW = 16  # numbers of a buffer on which a decision may depend
_NOT_SHARED = (*_PLAIN, nn.Module, Tensor, type, Enum, torch.dtype, torch.device)


class Watch:
    """Remembers attributes of a part's modules and of their classes as the first step leaves them.

    They must stay as they are.
    """

    def __init__(self, part: nn.Module, model: nn.Module) -> None:
        """Find out what to watch in a part of a model."""
        modules = dict(vars(part).get("horizonml_root", part).named_modules())
        around = {(path, name) for path, name, value in _around_units(part) if isinstance(value, _CONTAINERS)}
        places = sorted(_shared(model) | set_and_read(model).keys() | around)
        self._places = [(path, modules[path], name) for path, name in places if path in modules]
        kinds = {base for module in model.modules() for base in type(module).__mro__ if not _is_torch(base)}
        self._kinds = sorted(kinds - {object}, key=lambda kind: kind.__qualname__)
        self._globals = {
            name: function.__globals__
            for _, function in itertools.chain.from_iterable(map(_methods, self._kinds))
            if is_own_file(function.__code__.co_filename)  # what packages keep, such as caches, is their own business
            for name in function.__code__.co_names
            if isinstance(function.__globals__.get(name, object), _PLAIN + _CONTAINERS)
        }
        self._held: dict[str, tuple[Any, Any]] = {}
        self._parts = frozenset(map(id, parts_of(vars(part).get("horizonml_root", part))))

    def check(self) -> None:
        """Raise ModelError if one of the attributes has changed since the first call; steps call it at their end."""
        now = {f"{path}.{name}".lstrip("."): _value(module, name) for path, module, name in self._places}
        for kind in self._kinds:
            plain = ((name, value) for name, value in vars(kind).items() if isinstance(value, _PLAIN))
            now |= {f"{kind.__qualname__}.{name}": value for name, value in plain if not name.startswith("__")}
        now |= {name: space.get(name) for name, space in self._globals.items()}
        if not self._held:
            self._held = {name: (_form(value), copy_of(value, self._parts)) for name, value in now.items()}
        for name, (form, copy) in self._held.items():
            if not is_same(_form(now.get(name)), form, copy):
                raise ModelError(
                    f"{name} has changed, which code in another part of the model reads, and stages have copies of "
                    "their own; hand it on as a tensor, or train with parallel.strategy: ddp"
                )


def _value(module: nn.Module, name: str) -> Any:
    """Return an attribute of a module; a small buffer as numbers, which a `train` reads."""
    buffer = module._buffers.get(name)
    if buffer is None or buffer.numel() > _FEW:
        return vars(module).get(name)
    return buffer.tolist()


def set_everywhere(part: nn.Module) -> dict[str, str]:
    """Return the plain attributes of those modules whose code all parts of a model run, as text by their names."""
    return {
        f"{path}.{name}".lstrip("."): "a tensor" if isinstance(value, Tensor) else repr(value)[:_MOST_SHOWN]
        for path, name, value in _around_units(part)
        if isinstance(value, (*_PLAIN, Tensor))
    }


def require_alike(parts: Sequence[Mapping[str, str]]) -> None:
    """Raise ModelError if parts of a model differ in what they hold; those that hold nothing are left out."""
    held = [part for part in parts if part]
    for name in sorted(set().union(*held)):
        values = list(dict.fromkeys(part.get(name, "nothing") for part in held))
        if len(values) > 1:
            raise ModelError(
                f"{printable(name)} is {printable(values[0])} in one part of the model and {printable(values[1])} in "
                "another: the forward sets it where not every part gets to; set it before the first module is called, "
                "or train with parallel.strategy: ddp"
            )


def _form(value: Any) -> Any:
    """Return a value without its tensors, which are handed on between parts."""
    leaves = tree_flatten(value)[0]
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        return value
    return [leaf if isinstance(leaf, _PLAIN) else type(leaf).__name__ for leaf in leaves]


def _around_units(part: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield the attributes of modules whose code all parts run, though not all to its end: path, name and value."""
    if isinstance(part, ModuleSlice):
        for path, module in part.horizonml_root.named_modules():
            if not part.has_in_unit(path):
                yield from ((path, name, value) for name, value in vars(module).items() if name not in _OF_EVERY)


def _shared(model: nn.Module) -> set[tuple[str, str]]:
    """Return the attributes through which several modules reach one object that may change, by path and name."""
    parts = frozenset(map(id, parts_of(model)))
    found: dict[int, set[tuple[str, str]]] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_EVERY and not isinstance(value, _NOT_SHARED):
                for key in reached(value, parts):
                    found.setdefault(key, set()).add((path, name))
    every = [places for key, places in found.items() if key not in parts and len({path for path, _ in places}) > 1]
    modules = {id(module): (path, module) for path, module in model.named_modules()}
    # What another module holds beside its own modules, its code may ask for anything.
    held = [(modules[key], places) for key, places in found.items() if key in modules]
    every += [
        {(path, name) for name in _set_by(type(module))}
        for (path, module), places in held
        if any(holder != path for holder, _ in places)
    ]
    return set().union(*every)


def set_and_read(model: nn.Module) -> dict[tuple[str, str], str]:
    """Return the attributes that the steps of a module set and that other code reads: the name of its class.

    Other code is that of another class, or a `train` of the module's own, which stages do not call.
    """
    kinds = {type(module) for module in model.modules() if not _is_torch(type(module))}
    read = {
        kind: {name for codes in _functions(kind).values() for code in codes for name in _foreign(code)}
        for kind in kinds
    }
    found: dict[tuple[str, str], str] = {}
    for path, module in model.named_modules():
        kind = type(module)
        if kind not in kinds:
            continue
        own = _functions(kind)
        containers = {name for name, value in vars(module).items() if isinstance(value, _CONTAINERS)}
        changes = _set_by(kind) | set(module._buffers) | containers - _OF_EVERY
        if "train" in own:
            found |= {(path, name): "train" for name in changes & _reads_of(own, "train")}
        for other in kinds - {kind} if path else ():
            through = {name for method in read[other] & own.keys() - {"forward"} for name in _reads_of(own, method)}
            names = changes - module._buffers.keys() & (read[other] | through)
            found |= {(path, name): other.__name__ for name in names}
    return found


def _is_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.")


def _functions(kind: type) -> dict[str, list[CodeType]]:
    """Return the code of a class and its bases that steps may call, by the names of methods and properties."""
    found: dict[str, list[CodeType]] = {}
    for name, function in itertools.chain.from_iterable(map(_methods, kind.__mro__)):
        found.setdefault(name, []).append(function.__code__)
        for called in function.__code__.co_names:  # functions beside the class
            helper = function.__globals__.get(called)
            if isinstance(helper, FunctionType) and helper.__module__ == function.__module__:
                found.setdefault(f"{called}()", []).append(helper.__code__)
    return found


def _methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions of a class, without its bases, that steps may call."""
    for name, value in vars(kind).items() if not _is_torch(kind) else ():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(function, FunctionType) and name not in _ONLY_ONCE:
            yield name, function


def _set_by(kind: type) -> set[str]:
    """Return the names of the attributes that the code of a class sets in steps."""
    return {
        str(instruction.argval)
        for codes in _functions(kind).values()
        for code in codes
        for instruction in _inside(code)
        if instruction.opname == "STORE_ATTR"
    }


def _reads_of(own: Mapping[str, Sequence[CodeType]], method: str) -> set[str]:
    """Return the names that a method reads of `self`, and those that the methods read that it calls."""
    found: set[str] = set()
    waiting = [method]
    while waiting:
        for name in {name for code in own[waiting.pop()] for name in _named(code, of_self=True)}:
            if name not in found and name in own:
                waiting.append(name)
            found.add(name)
    return found


def _inside(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of code, and of the functions in it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _inside(constant)


def _foreign(code: CodeType) -> Iterator[str]:
    """Yield the names of attributes that code reads of anything but `self`."""
    yield from _named(code, of_self=False)
    for instruction in _inside(code):
        if instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, str):
            yield instruction.argval  # for getattr


def _named(code: CodeType, of_self: bool) -> Iterator[str]:
    before = None
    for instruction in _inside(code):
        own = before is not None and before.opname.startswith("LOAD_") and before.argval == "self"
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and own == of_self:
            yield str(instruction.argval)
        before = instruction
