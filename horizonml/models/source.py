"""Finds the code that a job names as `module:callable`, and checks it before it is called.

A job file that names code runs code, because importing a module runs it. A job file must not, however, be able to call
arbitrary functions of the machine, such as `subprocess:getoutput`, so only these are called:

- subclasses of `torch.nn.Module`;
- functions that are annotated to return one: `def build() -> torch.nn.Module`;
- functions without a return annotation, if they are your own: neither part of Python nor of an installed package.
"""

from __future__ import annotations

import functools
import inspect
import sysconfig
import typing
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import nn

from horizonml.errors import ModelError
from horizonml.machine.code import find as find_code

_HOW = (
    "name a subclass of torch.nn.Module, or a function of your own that returns one and says so: "
    "`def build(...) -> torch.nn.Module`"
)


def find(name: str) -> Callable[..., nn.Module]:
    """Return the class or function that `module:callable` names, without calling it.

    Raises ModelError, which names the file and the nearest name.
    """
    target = find_code(name, "model.name", ModelError)
    _check(name, target)
    function: Callable[..., nn.Module] = target
    return function


def _check(name: str, target: Any) -> None:
    """Raise ModelError unless this may be called for a model."""
    if isinstance(target, type):
        if not issubclass(target, nn.Module):
            raise ModelError(f"model.name: {name} is a class, but not a torch.nn.Module; {_HOW}")
        return
    if isinstance(target, nn.Module):
        raise ModelError(f"model.name: {name} is a model already, and every rank builds its own part; {_HOW}")
    function = _python_function(target)
    if function is None:
        kind = "is not written in Python" if callable(target) else f"is of type {type(target).__name__}, not a function"
        raise ModelError(f"model.name: {name} {kind}; {_HOW}")
    returned = _returned(function)
    if returned is None:
        if not _is_own(function):
            raise ModelError(
                f"model.name: {name} does not say that it returns a torch.nn.Module, and comes from "
                f"{function.__module__}, which is not your own code; {_HOW}"
            )
    elif not (isinstance(returned, type) and issubclass(returned, nn.Module)):
        shown = getattr(returned, "__name__", returned)
        raise ModelError(f"model.name: {name} returns {shown}, not a torch.nn.Module; {_HOW}")


def _python_function(target: Any) -> FunctionType | None:
    """Return the function that is run when `target` is called, if it is written in Python."""
    while isinstance(target, functools.partial):
        target = target.func
    if callable(target) and not inspect.isroutine(target) and not hasattr(target, "__wrapped__"):
        target = type(target).__call__
    target = inspect.unwrap(target) if callable(target) else target
    target = target.__func__ if inspect.ismethod(target) else target
    return target if isinstance(target, FunctionType) else None


def _returned(function: FunctionType) -> Any:
    """Return a function's return annotation, or None if it has none or the annotation is not known at run time."""
    if function.__annotations__.get("return", Any) in (Any, "Any"):
        return None
    try:
        returned = typing.get_type_hints(function)["return"]
    except Exception:  # noqa: BLE001  (the names in annotations may stand for anything, or for nothing)
        return None
    returned = typing.get_origin(returned) or returned
    bound = getattr(returned, "__bound__", None)  # of a type variable
    return bound or returned


def _is_own(function: FunctionType) -> bool:
    """Return whether a function is neither part of Python nor of an installed package."""
    file = Path(function.__code__.co_filename)
    if function.__code__.co_filename.startswith("<frozen") or {"site-packages", "dist-packages"} & set(file.parts):
        return False
    return not any(file.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
