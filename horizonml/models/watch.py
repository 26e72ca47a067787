"""Watches, while a model trains in parts, what Python code in one part may change and that in another part reads.

A proof runs a few steps. What changes later, such as a setting that several blocks share, or a flag that a block sets
and the model's own forward reads, is noticed here: each part has its own copy, and only one of them would change.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from horizonml.errors import ModelError
from horizonml.models.module_slice import ModuleSlice
from horizonml.models.own_state import copy_of, is_same
from horizonml.text import printable

_ONLY_ONCE = ("__init__", "reset_parameters", "extra_repr", "load_state_dict")  # which no step calls
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MOST_SHOWN = 100  # characters of a value
_NOT_SHARED = (*_PLAIN, nn.Module, Tensor, type, FunctionType, Enum, torch.dtype, torch.device, tuple)


class Watch:
    """Remembers attributes of a part's modules as the first step leaves them; they must stay as they are."""

    def __init__(self, part: nn.Module, model: nn.Module) -> None:
        """Find out what to watch in a part of a model."""
        modules = dict(vars(part).get("horizonml_root", part).named_modules())
        places = sorted(_shared(model) | _set_and_read(model))
        self._places = [(path, modules[path], name) for path, name in places if path in modules]
        self._held: list[tuple[Any, Any]] = []

    def check(self) -> None:
        """Raise ModelError if one of the attributes has changed since the first call; steps call it at their end."""
        values = [vars(module).get(name) for _, module, name in self._places]
        if not self._held:
            self._held = [(_form(value), copy_of(value)) for value in values]
        for (path, _, name), value, (form, copy) in zip(self._places, values, self._held, strict=True):
            if not is_same(_form(value), form, copy):
                raise ModelError(
                    f"{f'{path}.' if path else ''}{name} has changed, which code in another part of the model reads, "
                    "and stages have copies of their own; hand it on as a tensor, or train with parallel.strategy: ddp"
                )


def set_everywhere(part: nn.Module) -> dict[str, str]:
    """Return the plain attributes of those modules whose code all parts of a model run, as text by their names."""
    if not isinstance(part, ModuleSlice):
        return {}
    return {
        f"{path}.{name}".lstrip("."): repr(value)[:_MOST_SHOWN]
        for path, module in part.horizonml_root.named_modules()
        if not part.has_in_unit(path)
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) and name not in ("training", "forward") and not name.startswith("_")
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


def _shared(model: nn.Module) -> set[tuple[str, str]]:
    """Return the attributes that are objects of several modules, by path and name."""
    found: dict[int, list[tuple[str, str]]] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not isinstance(value, _NOT_SHARED):
                found.setdefault(id(value), []).append((path, name))
    return {place for places in found.values() if len(places) > 1 for place in places}


def readers(model: nn.Module) -> dict[type, set[str]]:
    """Return the names of attributes that the code of a model's classes reads of anything but their own `self`."""
    return {kind: {name for code in every for name in _foreign(code)} for kind, every in _code_of(model).items()}


def _set_and_read(model: nn.Module) -> set[tuple[str, str]]:
    """Return the attributes that the steps of a module set and that the code of another class reads."""
    read = readers(model)
    sets = {kind: {name for code in every for name in _set(code)} for kind, every in _code_of(model).items()}
    return {
        (path, name)
        for path, module in model.named_modules()
        for name in (sets.get(type(module), ()) if path else ())
        if any(name in names for kind, names in read.items() if kind is not type(module))
    }


def _code_of(model: nn.Module) -> dict[type, list[CodeType]]:
    """Return the code of a model's own classes that steps may call."""
    kinds = {type(module) for module in model.modules() if not type(module).__module__.startswith("torch.")}
    return {kind: [code for base in kind.__mro__ for code in _steps(base)] for kind in kinds}


def _steps(kind: type) -> Iterator[CodeType]:
    """Yield the code of a class that steps may call."""
    if not kind.__module__.startswith("torch."):
        for name, function in vars(kind).items():
            if isinstance(function, FunctionType) and name not in _ONLY_ONCE:
                yield function.__code__


def _inside(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of code, and of the functions in it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _inside(constant)


def _set(code: CodeType) -> Iterator[str]:
    """Yield the names of attributes that code sets."""
    for instruction in _inside(code):
        if instruction.opname == "STORE_ATTR":
            yield str(instruction.argval)


def _foreign(code: CodeType) -> Iterator[str]:
    """Yield the names of attributes that code reads of anything but `self`."""
    before = None
    for instruction in _inside(code):
        own = before is not None and before.opname.startswith("LOAD_FAST") and before.argval == "self"
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and not own:
            yield str(instruction.argval)
        if instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, str):
            yield instruction.argval  # for getattr
        before = instruction
