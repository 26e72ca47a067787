"""Copies the tree of a model's modules without its tensors, so that parts of it can be run with other forwards."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from horizonml.errors import ModelError

_M = TypeVar("_M", bound=nn.Module)


class Forward(ABC):
    """Takes the place of a module's `forward`; unlike a function, it is copied together with the module."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""


class _Listing:
    """Takes the place of a copy's method that lists tensors, because other stages hold some of them.

    The first one can be had, for many forwards ask it for its device or type; whoever goes on to the end gets an error.
    """

    def __init__(self, module: nn.Module, method: str, name: str, stand_in: Tensor) -> None:
        """Remember the copy, the method, and one tensor that the copy lacks."""
        self._module, self._method, self._name, self._stand_in = module, method, name, stand_in

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield what is here, or one stand-in if nothing is, and raise ModelError at the end."""
        here = getattr(nn.Module, self._method)(self._module, *args, **kwargs)
        yield next(here, (self._name, self._stand_in))
        yield from here
        _refuse(self._name)


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ModelError(
        f"the model's forward goes through all parameters or buffers, of which {name}, for one, is not in every stage; "
        "do that in a module that holds them all (parallel.strategy: ddp trains the model whole)"
    )


class Skeleton:
    """Copies a model's modules: the same classes and attributes, without the tensors that are not kept.

    `root` is the copy. In it, units (modules that are named in `forwards`) have these forwards. `placeholders` are
    zeros, by the names of the tensors that they replace: parameters and persistent buffers. Code that looks at a shape
    or a dtype still finds it. `constants` are the buffers outside of units that no checkpoint has; every copy has them,
    but not among its buffers.
    """

    def __init__(self, model: nn.Module, forwards: Mapping[str, Forward], kept: Collection[str]) -> None:
        """Copy the tree; units named in `kept` keep their tensors, and so do modules for tensors named there."""
        self._forwards, self._kept = forwards, frozenset(kept)
        self._copies: dict[int, nn.Module] = {}
        self.placeholders: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}
        self._lacking: dict[str, dict[str, Tensor]] = {"named_parameters": {}, "named_buffers": {}}
        self.root = self._copy(model, "", unit=False, keep=False)
        if self.placeholders:
            self.root.__dict__["state_dict"] = functools.partial(_refuse, next(iter(self.placeholders)))
        modules, copies = dict(self.root.named_modules()), set(map(id, self._copies.values()))
        for method, lacking in self._lacking.items():  # which `parameters` and `buffers` call, too
            for name, stand_in in lacking.items():
                path = name
                while path:  # the modules around the tensor, from the innermost
                    path = path.rpartition(".")[0]
                    module = modules.get(path)
                    if module is not None and id(module) in copies:
                        module.__dict__.setdefault(method, _Listing(module, method, name, stand_in))

    def _copy(self, module: _M, path: str, unit: bool, keep: bool) -> _M:
        if id(module) in self._copies:
            return self._copies[id(module)]  # type: ignore[return-value]
        copy = object.__new__(type(module))
        self._copies[id(module)] = copy
        attributes = copy.__dict__
        attributes.update(module.__dict__)
        if path in self._forwards:
            unit, keep = True, path in self._kept
            attributes["forward"] = self._forwards[path]
        prefix = f"{path}." if path else ""
        attributes["_modules"] = {
            name: child if child is None or keep else self._copy(child, prefix + name, unit, keep)
            for name, child in module._modules.items()
        }
        parameters: dict[str, nn.Parameter | None] = {}
        buffers: dict[str, Tensor | None] = {}
        attributes["_parameters"], attributes["_buffers"] = parameters, buffers
        for name, parameter in module._parameters.items():
            if parameter is None or keep or prefix + name in self._kept:
                parameters[name] = parameter
            else:
                attributes[name] = self._lack("named_parameters", prefix + name, parameter)
        for name, buffer in module._buffers.items():
            if buffer is None or keep or prefix + name in self._kept:
                buffers[name] = buffer
            elif not unit and name in module._non_persistent_buffers_set:
                attributes[name] = self.constants[prefix + name] = buffer
                self._lacking["named_buffers"][prefix + name] = buffer
            else:
                attributes[name] = self._lack("named_buffers", prefix + name, buffer)
                if not unit:  # the model's own forward may change it
                    attributes[name] = self.placeholders[prefix + name] = attributes[name].clone()
        return copy

    def _lack(self, method: str, name: str, tensor: Tensor) -> Tensor:
        """Return a placeholder for a tensor that the module's `method` should have listed."""
        self.placeholders[name] = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        self._lacking[method][name] = self.placeholders[name]
        return self.placeholders[name]

    def zero_constants(self) -> None:
        """Give the constants zeros for values, where they have no memory."""
        for name in self.constants:
            path, _, last = name.rpartition(".")
            owner, constant = self.root.get_submodule(path), self.constants[name]
            if constant.is_meta:
                owner.__dict__[last] = torch.zeros(constant.shape, dtype=constant.dtype)
