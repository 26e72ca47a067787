"""Finds the code and the optional packages that a job needs, or says how to get them.

Code is named as `module:attribute`, and lies in the working directory or among the installed packages.
"""

from __future__ import annotations

import importlib
import operator
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from horizonml.errors import HorizonError, MissingPackage
from horizonml.text import nearest

_inheritance: list[Callable[[], object]] = []


def hand_down(receive: Callable[[], object]) -> None:
    """Let processes that this one starts find the same code: each of them calls `receive`, which is pickled for it."""
    _inheritance.append(receive)


def inheritance() -> list[Callable[[], object]]:
    """Return what a process that this one starts must call to find the same code."""
    return list(_inheritance)


def python_module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package in another process.

    Python does not look for it in the working directory, where another package may have its name, unless this package
    itself is there, as in a checkout.
    """
    is_here = Path(__file__).resolve().parents[2] == Path.cwd().resolve()
    return [sys.executable, *([] if is_here else ["-P"]), "-m", name, *arguments]


def find(name: str, field: str, problem: type[HorizonError]) -> Any:
    """Return what `module:attribute` names; `field` is the job's field that names it.

    Modules in the working directory are found, too. Raises `problem`, which names the file and the nearest name.
    """
    module_name, _, attribute = name.partition(":")
    target: Any = _import(module_name, field, problem)
    place = module_name
    for part in attribute.split("."):
        if not hasattr(target, part):
            file = getattr(target, "__file__", None) or place
            raise problem(f"{field}: {file} has no {part!r}{nearest(part, _public(target))}")
        target, place = getattr(target, part), f"{place}.{part}"
    return target


def _import(name: str, field: str, problem: type[HorizonError]) -> ModuleType:
    if name.split(".")[0] == "torchvision":
        from horizonml.machine.torchvision import import_torchvision

        import_torchvision()
    here = os.getcwd()
    if not {here, ""} & set(sys.path):
        sys.path.insert(0, here)  # as `python -m` does, however this command was started
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name != missing and not name.startswith(f"{missing}."):
            raise problem(f"{field}: {name} needs the module {missing}, which is not installed") from error
        parent, _, last = missing.rpartition(".")
        known = [module.name for module in pkgutil.iter_modules(_folders(parent))]
        raise problem(
            f"{field}: there is no module {missing} in {here}, in the folders of PYTHONPATH, or among the installed "
            f"packages{nearest(last, known) or _advice(name, last)}"
        ) from error
    except (Exception, SystemExit) as error:  # a module's own code runs here and may fail in any way
        raise problem(f"{field}: importing {name} failed: {where(error)}") from error


def _advice(name: str, missing: str) -> str:
    """Return what may help to find a module that is nowhere, as a part of a sentence."""
    if name.endswith(".py"):
        return f"; name it without its ending: {name.removesuffix('.py')}"
    return f"; start in the folder that has {missing}.py"


def _folders(package: str) -> list[str]:
    """Return where the modules of a package lie; without a package, return the working directory."""
    return list(getattr(sys.modules.get(package), "__path__", [])) if package else [os.getcwd()]


def _public(owner: Any) -> list[str]:
    """Return the names that the user may have meant."""
    return [name for name in dir(owner) if not name.startswith("_")]


def own_files() -> list[Path]:
    """Return the files of the code that this process has imported and that is neither HorizonML's nor installed."""
    return [
        path
        for path in map(Path, sorted({str(module.__file__) for module in own_modules()[0].values()}))
        if path.is_file()
    ]


_loaded: tuple[list[ModuleType], dict[str, ModuleType], list[ModuleType]] = ([], {}, [])


def own_modules() -> tuple[dict[str, ModuleType], list[ModuleType]]:
    """Return the modules that are neither HorizonML's nor installed, by name, and all others.

    There are thousands of others, so they are looked through again only after something has been imported; until then
    the result is the same object.
    """
    global _loaded
    now = dict(sys.modules)
    if len(now) != len(_loaded[0]) or not all(map(operator.is_, now.values(), _loaded[0])):
        own = {name: module for name, module in now.items() if _is_own(module)}
        others = [module for name, module in now.items() if name not in own]
        result = list(now.values()), own, others
        if any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in others):
            return result[1:]  # its names are not all there yet
        _loaded = result
    return _loaded[1:]


def _is_own(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and file.endswith(".py") and is_own_file(file)


def is_own_file(file: str) -> bool:
    """Return whether a file of code is neither HorizonML's nor installed."""
    return not file.startswith((_HOUSE, *_INSTALLED, "<frozen"))


def where(error: BaseException) -> str:
    """Return the error as text, after the file and the line of the user's code that raised it.

    That is the last line in a file that is neither HorizonML's nor an installed package's, if there is one.
    """
    text = f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    outside = [frame for frame in frames if not frame.filename.startswith(_HOUSE)]
    outside = [frame for frame in outside if Path(frame.filename) != Path(importlib.__file__)]
    own = [frame for frame in outside if not frame.filename.startswith(_INSTALLED)]
    last = (own or outside)[-1:]
    return f"{last[0].filename}:{last[0].lineno}: {text}" if last else text


_HOUSE = str(Path(__file__).parents[1]) + os.sep
# With the folders of the system and of the user, which an environment may use, too, and of `pip install --target`.
_FOLDERS = [
    entry
    for entry in sys.path
    if entry and (Path(entry).name in ("site-packages", "dist-packages") or any(Path(entry).glob("*.dist-info")))
]
_INSTALLED = (os.path.dirname(os.__file__), *(sysconfig.get_path(kind) for kind in ("purelib", "platlib")), *_FOLDERS)


EXTRAS = {
    "matplotlib": "bench",
    "kubernetes": "cluster",
    "peft": "lora",
    "scipy": "svhn",
    "pyarrow": "table",
    "datasets": "huggingface",
    "aiohttp": "stream",
    "s3fs": "stream-s3",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "sqlalchemy": "mlflow",
    "alembic": "mlflow",
    "transformers": "hf",
    "tokenizers": "hf",
    "timm": "timm",
}


def require(package: str, what: str) -> None:
    """Raise MissingPackage unless the optional package that `what` needs is installed."""
    if find_spec(package) is None:
        raise MissingPackage(
            f"{what} needs {package}, which is not installed: pip install 'horizonml[{EXTRAS[package]}]'"
        )
