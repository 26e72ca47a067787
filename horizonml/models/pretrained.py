"""Gives parameters and buffers their pretrained values, one by one, from a file whose names it matches to a model's.

It also reads single tensors from files of weights; the rest of a file is mapped into memory, but never read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from filelock import FileLock
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import Parameter

from horizonml.errors import ModelError
from horizonml.files import cache_folder, checksum, safe_name, write_atomically
from horizonml.models.download import locate
from horizonml.models.spec import WeightsSpec
from horizonml.text import count, human_bytes

_log = logging.getLogger(__name__)

_INDEX = "*.safetensors.index.json"
_MOST_INDEX = 64 << 20  # bytes
_SAFE_RELEASE = "2.10"  # of PyTorch, the first without the known ways around `weights_only`
_WRAPPED = ("state_dict", "model_state_dict", "model", "module")  # keys under which training scripts put a state dict
_LOCK_SECONDS = 1800.0
_MOST_NAME = 200  # characters of a tensor's name in an error
_MOST_SHARED = 8  # times the size of a file that its tensors may take, where names share one tensor


class SafetensorsFiles:
    """Reads one safetensors file, or several that hold parts of a model."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read the files' headers. Raises ModelError."""
        self._where: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}  # by name
        for path in paths:
            try:
                handle = safetensors.safe_open(path, framework="pt")
                found = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
            except (OSError, safetensors.SafetensorError) as error:
                raise ModelError(f"model.weights: {path} cannot be read: {error}") from error
            if twice := sorted(self.shapes.keys() & found.keys()):
                raise ModelError(f"model.weights: {path} and another file of its folder both hold {twice[0]}")
            self.shapes |= found
            self._where |= dict.fromkeys(found, handle)

    def read(self, name: str) -> Tensor:
        """Return one tensor; its memory may be the file's own."""
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor


class StateDict:
    """Reads a state dict that `torch.save` wrote, without running anything that the file may contain."""

    def __init__(self, path: Path) -> None:
        """Map the file into memory. Raises ModelError."""
        found = _load(path, mmap=True)
        self._tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        self.shapes = {name: tuple(value.shape) for name, value in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """Return one tensor; its memory may be the file's own."""
        return self._tensors[name]


WeightFile = SafetensorsFiles | StateDict


def opened(path: Path) -> WeightFile:
    """Open a file of weights, or a folder of them. Raises ModelError."""
    files = files_of(path)
    if files[0].suffix == ".safetensors":
        return SafetensorsFiles(files)
    if zipfile.is_zipfile(files[0]):
        return StateDict(files[0])
    _check_is_pickled(files[0])
    return SafetensorsFiles([_converted(files[0])])


def _check_is_pickled(path: Path) -> None:
    """Raise ModelError unless a file begins as the state dicts of torch before 1.6 do."""
    try:
        with path.open("rb") as file:
            first = file.read(1)
    except OSError as error:
        raise ModelError(f"model.weights: {path} cannot be read: {error.strerror or error}") from error
    if first != pickle.PROTO:
        raise ModelError(
            f"model.weights: {path} is not a file of weights, or it is damaged; give a safetensors file, or a state "
            "dict that torch.save wrote"
        )


def files_of(path: Path) -> list[Path]:
    """Return the files of weights at a path. Raises ModelError."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        seen = "" if path.is_absolute() else f", as seen from {Path.cwd()}"
        raise ModelError(f"model.weights: {path} is neither a file nor a folder on this machine{seen}; copy it there")
    index = next(iter(sorted(path.glob(_INDEX))), None)
    if index is not None:
        try:
            with index.open("rb") as file:
                content = file.read(_MOST_INDEX + 1)
            if len(content) > _MOST_INDEX:
                raise ValueError(f"it is larger than {human_bytes(_MOST_INDEX)}")
            found = [path / safe_name(name) for name in sorted(set(json.loads(content)["weight_map"].values()))]
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"model.weights: {index} is not an index of safetensors files: {error}") from error
        lost = [file.name for file in found if not file.is_file()]
        if lost:
            raise ModelError(f"model.weights: {path} lacks {', '.join(lost)}, which {index.name} names")
    else:
        found = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model.bin"))
    if not found:
        is_run = (path / "checkpoints").is_dir()
        way_out = f"; it is a run's folder, so export its model: horizonml export {path} FILE.safetensors" * is_run
        raise ModelError(f"model.weights: {path} holds no *.safetensors files{way_out}")
    return found


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and digests of a folder's files of weights. Raises ModelError."""
    if path.is_file():
        return _file_digest(path)
    text = "".join(f"{file.name} {_file_digest(file)}\n" for file in files_of(path))
    return hashlib.sha256(text.encode()).hexdigest()


def _file_digest(path: Path) -> str:
    """Return a file's SHA-256, which is remembered for as long as the file does not change."""
    try:
        status = path.stat()
        about = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
        note = cache_folder() / "weights" / "digests" / hashlib.sha256(about.encode()).hexdigest()[:32]
        if note.is_file() and len(known := note.read_text()) == 64:
            return known
        found = checksum(path)
    except OSError as error:
        raise ModelError(f"model.weights: {path} cannot be read: {error.strerror or error}") from error
    try:
        write_atomically(note, found.encode())
    except OSError as error:  # the file is read again the next time
        _log.debug("the digest of %s is not remembered: %s", path, error)
    return found


def _load(path: Path, mmap: bool) -> Mapping[str, Any]:
    """Return a state dict, taken out of what training scripts wrap it in. Raises ModelError."""
    if torch.__version__ < _SAFE_RELEASE:
        raise ModelError(
            f"model.weights: {path} is a pickle, which can make PyTorch {torch.__version__} run its code; update "
            "PyTorch to 2.11 or later, or convert the file to safetensors on another device"
        )
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"model.weights: {path} contains more than tensors, and no code is run from such a file; save "
            "model.state_dict() alone, or convert it to safetensors"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"model.weights: {path} cannot be read: {reason}") from error
    while isinstance(found, Mapping) and not any(isinstance(value, Tensor) for value in found.values()):
        inner = next((found[key] for key in _WRAPPED if key in found), None)
        if inner is None:
            break
        found = inner
    if not isinstance(found, Mapping) or not any(isinstance(value, Tensor) for value in found.values()):
        raise ModelError(f"model.weights: {path} is not a state dict: it holds no tensors by name")
    for name, value in found.items():
        if isinstance(value, Tensor) and not _is_plain(value):
            raise ModelError(
                f"model.weights: {path}: {str(name)[:_MOST_NAME]!a} is not a plain tensor of real numbers that is "
                "in the file completely; save model.state_dict() with contiguous tensors on the CPU"
            )
    return found


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is dense, real, in memory, and no larger than what the file holds of it.

    A tensor that was expanded, for example, has any size, and a few bytes in the file.
    """
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_complex() or tensor.is_quantized:
        return False
    return type(tensor) in (Tensor, Parameter) and tensor.nbytes <= tensor.untyped_storage().nbytes()


def _converted(path: Path) -> Path:
    """Return a safetensors file of a state dict in torch's old format, which can only be read as a whole.

    It is made once per machine. Raises ModelError.
    """
    target = cache_folder() / "weights" / "converted" / f"{digest(path)}.safetensors"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock"), timeout=_LOCK_SECONDS):
            if not target.is_file():
                found = {n: v.detach() for n, v in _load(path, mmap=False).items() if isinstance(v, Tensor)}
                if sum(tensor.nbytes for tensor in found.values()) > _MOST_SHARED * path.stat().st_size:
                    raise ModelError(
                        f"model.weights: the tensors of {path} take more than {_MOST_SHARED} times as much as the file "
                        "itself, since many of them share memory; save them as a safetensors file"
                    )
                plain = torch.contiguous_format
                tensors = {str(name): tensor.clone(memory_format=plain) for name, tensor in found.items()}
                hidden = target.with_suffix(f".{os.getpid()}.tmp")
                save_file(tensors, hidden)
                os.replace(hidden, target)
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"model.weights: {path} cannot be converted to {target}: {error}") from error
    return target


_PREFIXES = ("", "module.", "model.", "module.model.", "_orig_mod.", "base_model.", "model/")  # of names in files
_BASE_LAYER = ".base_layer"  # peft's name for a layer that has got adapters
_SHOWN = 3  # names in a list of them


@dataclass
class Pretrained:
    """Holds an open file of weights; `keys` names the tensor of the file for each of the model's that it has."""

    file: WeightFile
    keys: Mapping[str, str]
    digest: str
    notes: tuple[str, ...] = ()  # what the user should know of tensors that are newly initialised or not used
    bytes_read: int = field(default=0)

    def read(self, like: Tensor, name: str) -> Tensor | None:
        """Return a copy of a tensor's pretrained value in the dtype of `like`, or None if it has none."""
        if name not in self.keys:
            return None
        value = self.file.read(self.keys[name])
        self.bytes_read += value.nbytes
        return value.detach().to(like.dtype, copy=True).contiguous()


def pretrained(spec: WeightsSpec, model_name: str, model: nn.Module, ties: Sequence[Sequence[str]]) -> Pretrained:
    """Open the weights of a job, and match them to its model, whose tensors may have no memory.

    `ties` are names of parameters that are one and the same. Raises ModelError if the names do not match, unless the
    job allows that.
    """
    path = locate(spec, model_name)
    file, found = opened(path), digest(path)
    if spec.sha256 is not None and found != spec.sha256:
        raise ModelError(f"model.weights.sha256: {path} has {found}, not {spec.sha256}")
    wanted = {name: value for name, value in model.state_dict(keep_vars=True).items() if not is_adapter(name)}
    by_name = _match(wanted, file.shapes)
    for names in ties:  # files often hold one of them only
        known = next((by_name[name] for name in names if name in by_name), None)
        if known is not None:
            by_name |= {name: known for name in names if name in wanted and name not in by_name}
    if not by_name:
        raise ModelError(
            f"model.weights: no tensor of {path} belongs to {model_name}: the file has {_few(file.shapes)}; the model "
            f"{_few(wanted)}"
        )
    shaped = {name: key for name, key in by_name.items() if file.shapes[key] == tuple(wanted[name].shape)}
    notes = [
        f"{name} is newly initialised: its shape is {list(file.shapes[key])} in {path.name}, and "
        f"{list(wanted[name].shape)} in the model"
        for name, key in by_name.items()
        if name not in shaped
    ]
    missing = [name for name in wanted if name not in by_name and _counts(name)]
    extra = _superfluous(model, set(file.shapes) - set(by_name.values()))
    lists = [f"lacks {_few(missing)}"] * bool(missing) + [f"has {_few(extra)}, which the model lacks"] * bool(extra)
    fits, needed = (sum(map(_counts, names)) for names in (shaped, wanted))
    fitting = f"{fits} of {count(needed, 'tensor')}"
    if spec.strict and 2 * fits < needed:
        raise ModelError(
            f"model.weights: {path} is probably for another model, since it fits {fitting} of {model_name}: "
            f"{' and '.join(['it ' + one for one in lists] or notes[:1])}; with model.weights.strict: false, the "
            "others begin anew"
        )
    if lists and spec.strict:
        raise ModelError(
            f"model.weights: {path} {' and '.join(lists)}; with model.weights.strict: false, what is missing is "
            "newly initialised, and what is superfluous is ignored"
        )
    notes += [f"model.weights: {path.name} {one}" for one in lists]
    notes.append(f"model.weights: {fitting} begin with the values of {path.name}")
    return Pretrained(file, shaped, found, tuple(notes))


def _counts(name: str) -> bool:
    """Return whether a tensor matters: files often lack the counts of batches, which nothing depends on."""
    return not name.endswith("num_batches_tracked")


def is_adapter(name: str) -> bool:
    """Return whether a tensor belongs to a LoRA adapter, which no file of the model itself has."""
    return ".lora_" in name


def plain_name(name: str) -> str:
    """Return the name of a model's own tensor as it is without adapters."""
    return name.replace(_BASE_LAYER, "")


def _match(wanted: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, str]:
    """Return the file's name for each of the model's, under those prefixes in either that fit the most names."""
    roots = {""} | {f"{name.partition('.')[0]}." for name in wanted if "." in name}
    best: dict[str, str] = {}
    for in_file, in_model in itertools.product(_PREFIXES, sorted(roots)):
        found = {name: key for name in wanted if (key := in_file + plain_name(name).removeprefix(in_model)) in there}
        if len(found) > len(best):
            best = found
    return best


def _superfluous(model: nn.Module, names: set[str]) -> list[str]:
    """Return the names in a file that are not used, without those that a model says to ignore (transformers)."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    own = (name for name in names if not name.startswith("optimizer/"))  # which checkpoints hold
    return sorted(name for name in own if not any(re.search(pattern, name) for pattern in ignored))


def _few(names: Iterable[str]) -> str:
    """Return the first few names, and how many there are if those are not all."""
    every = list(names)
    if len(every) <= _SHOWN + 1:
        return ", ".join(every)
    return f"{', '.join(every[:_SHOWN])}, ... ({count(len(every), 'tensor')})"
