"""Gives parameters and buffers their pretrained values, one by one, from a file whose names it matches to a model's."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from horizonml.errors import ModelError
from horizonml.models.download import locate
from horizonml.models.spec import WeightsSpec
from horizonml.models.weightfiles import WeightFile, digest, opened
from horizonml.text import count

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
