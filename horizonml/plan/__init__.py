"""The plan as data, and `horizonml.plan(job)`, which makes one: the package can be called like a function."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """Represents this package, whose name is also that of a function of `horizonml`."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return the plan for a job; see `horizonml.api.planning.plan`."""
        return import_module("horizonml.api.planning").plan(*args, **options)


sys.modules[__name__].__class__ = _Callable
