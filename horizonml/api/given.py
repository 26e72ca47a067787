"""Holds the models, data sets and tasks that were given to the Python API as objects, under names for a job.

A job names code as `module:attribute`. What can be imported under such a name is named so. Everything else, such as a
class of a notebook's cell, becomes an attribute of this module: `horizonml.api.given:MyNet`. The ranks of a local run
receive these objects from the process that starts them (see `horizonml.api.training`).
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from horizonml.errors import HorizonError, JobError

_objects: dict[str, Callable[[], Any]] = {}  # what makes the object of each name


@dataclass(frozen=True)
class Given:
    """Holds the objects of one run, by the names that its job has for them."""

    kinds: dict[str, str] = field(default_factory=dict)  # "model", "data" or "task", by name
    objects: dict[str, object] = field(default_factory=dict)

    def add(self, kind: str, thing: Any) -> str:
        """Return the `module:attribute` by which a job finds an object."""
        if (name := _importable(thing)) is not None:
            return name
        name = _plain_name(kind, thing)
        while name in self.objects and self.objects[name] is not thing:
            name = f"{kind}_{name}"
        self.kinds[name], self.objects[name] = kind, thing
        return f"{__name__}:{name}"

    def install(self) -> None:
        """Let jobs find the objects in this process."""
        for name, thing in self.objects.items():
            install(name, self.kinds[name], lambda thing=thing: thing)  # type: ignore[misc]


def install(name: str, kind: str, make: Callable[[], Any]) -> None:
    """Let jobs find an object by name, as `make` returns it when it is needed."""
    _objects[name] = lambda: _ADAPTERS[kind](make())


@contextmanager
def in_plain_words() -> Iterator[None]:
    """Name objects in errors as their makers did: a class of a notebook is `MyNet`, not `horizonml.api.given:MyNet`."""
    try:
        yield
    except HorizonError as error:
        error.args = tuple(part.replace(f"{__name__}:", "") if isinstance(part, str) else part for part in error.args)
        raise


@contextmanager
def in_this_process() -> Iterator[None]:
    """Use a model here as the ranks do, on the processor and in float32, whatever the script has chosen for itself."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), in_plain_words():
            yield
    finally:
        torch.set_default_dtype(before)


def __getattr__(name: str) -> Any:
    """Return an object by its name. Raises JobError for one that this process has never been given."""
    if name.startswith("_"):
        raise AttributeError(name)
    if name not in _objects:
        raise JobError(
            f"{name} was given to horizonml.train as an object, and this process does not have it: hand it to the "
            f"function of horizonml that you call (model=, data= or task=), or put it into a file and train with "
            f"`name: file:{name}`, which every process can import"
        )
    try:
        return _objects[name]()
    except HorizonError:
        raise
    except Exception as error:
        raise JobError(
            f"{name}, which was given as an object, cannot be made in the process of a rank: "
            f"{type(error).__name__}: {error}"
        ) from error


def _importable(thing: Any) -> str | None:
    """Return the `module:attribute` under which every process can import a class or a function, or None."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not module or not name or module == "__main__" or not re.fullmatch(r"[\w.]+:[\w.]+", f"{module}:{name}"):
        return None
    found: Any = sys.modules.get(module)
    if not getattr(found, "__file__", None):
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is thing else None


def _plain_name(kind: str, thing: Any) -> str:
    """Return a name for an object that says to people what it is."""
    while hasattr(thing, "func"):  # of functools.partial
        thing = thing.func
    own = getattr(thing, "__name__", type(thing).__name__)
    name = re.sub(r"\W", "", own) if own != "<lambda>" else ""
    return name if name and not name[0].isdigit() and not name.startswith("_") else kind


def _as_constructor(thing: Any) -> Any:
    """Return a class or a function that makes a model, from a class, anything that can be called, or a model."""
    import inspect

    from torch import nn

    if isinstance(thing, type) and issubclass(thing, nn.Module):
        return thing
    make: Callable[..., Any] = (lambda: copy.deepcopy(thing)) if isinstance(thing, nn.Module) else thing
    if not callable(make):
        raise JobError(f"model: give a class, a function that returns a torch.nn.Module, or a name, not {thing!r}")

    def build(*args: Any, **options: Any) -> nn.Module:
        model: nn.Module = make(*args, **options)
        return model

    build.__signature__ = inspect.signature(make)  # type: ignore[attr-defined]  # tells the arguments that it takes
    build.__annotations__ = {"return": nn.Module}
    return build


def _as_data(thing: Any) -> Any:
    """Return a function that returns the data, from a data set, a pair of them, or anything that can be called."""
    if isinstance(thing, type) or (callable(thing) and not hasattr(thing, "__getitem__")):
        return thing
    return lambda: thing


def _as_task(thing: Any) -> Any:
    """Return a class that makes a task, from a class or an instance."""
    if isinstance(thing, type):
        return thing

    class Made(type(thing)):  # type: ignore[misc]
        """Stands for a task that has been made already."""

        def __new__(cls, *args: Any, **options: Any) -> Any:
            if args or options:
                raise TypeError("the task is an instance already, and takes no options")
            return thing

    return Made


_ADAPTERS: dict[str, Callable[[Any], Any]] = {"model": _as_constructor, "data": _as_data, "task": _as_task}
