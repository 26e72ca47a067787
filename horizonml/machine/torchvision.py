"""Imports torchvision beside a CPU build of torch.

PyPI's torchvision for x86 is compiled for CUDA. Beside a CPU torch its compiled operators do not load, and the plain
import then fails while it describes two of them (`nms`, `qnms`) that are not there. HorizonML needs models, transforms
and data sets, none of which use those operators, so on exactly that failure the import is repeated with a
`register_fake` that ignores operators that do not exist. `torchvision.ops.nms` and the C++ image decoders stay
unavailable; a matching CPU build from the CPU wheel index has everything.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


def import_torchvision() -> ModuleType:
    """Return torchvision, imported so that it works whether or not its compiled operators load."""
    if "torchvision" in sys.modules:
        return sys.modules["torchvision"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to load image Python extension")
        try:
            return importlib.import_module("torchvision")
        except RuntimeError as error:
            if "torchvision::" not in str(error) or "does not exist" not in str(error):
                raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        strict = torch.library.register_fake
        torch.library.register_fake = _tolerant(strict)
        try:
            return importlib.import_module("torchvision")
        finally:
            torch.library.register_fake = strict


def _tolerant(strict: Callable[..., Any]) -> Callable[..., Any]:
    def register_fake(operator: Any, *args: Any, **kwargs: Any) -> Any:
        def decorate(function: Any) -> Any:
            try:
                return strict(operator, *args, **kwargs)(function)
            except RuntimeError:
                return function

        return decorate

    return register_fake
