"""Finds the samples on which an exported model is compared with the trained one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from horizonml.data.choose import load
from horizonml.data.dataset import DataInfo
from horizonml.data.seeds import name_seed
from horizonml.data.spec import DataSpec
from horizonml.data.tensors import TensorSpec
from horizonml.errors import HorizonError
from horizonml.text import count


@dataclass(frozen=True)
class Samples:
    """Holds a model's inputs, and says what they are."""

    inputs: tuple[Tensor, ...]  # in the order of `DataInfo.inputs`
    words: str
    real: bool  # whether they are from the data set

    def rows(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return some of the samples."""
        return tuple(tensor[start:stop] for tensor in self.inputs)


def find_samples(spec: DataSpec, info: DataInfo, number: int, cache: Path) -> Samples:
    """Return up to `number` held-out samples, or noise where this machine does not have the data.

    Nothing is downloaded. The words of noise say why it is noise.
    """
    try:
        if spec.name == "synthetic":
            return noise(info, number, "the data is synthetic")
        data = load(spec.model_copy(update={"download": False}), info, cache, inputs=True, targets=False)
        rows = min(number, info.held_out)
        found = data.batch(False, torch.arange(rows)).inputs(0, rows)
    except (HorizonError, OSError) as error:
        return noise(info, number, f"the held-out data cannot be read: {error}")
    inputs = (found,) if isinstance(found, Tensor) else tuple(found)
    return Samples(inputs, f"{count(len(inputs[0]), 'held-out sample')} of {spec.name}", True)


def noise(info: DataInfo, number: int, why: str) -> Samples:
    """Return samples of noise, the same ones every time."""
    generator = torch.Generator().manual_seed(name_seed(0, "export"))
    inputs = tuple(_noise(spec, name, info, number, generator) for spec, name in _named(info))
    return Samples(inputs, f"{count(number, 'sample')} of noise ({why})", False)


def _named(info: DataInfo) -> list[tuple[TensorSpec, str]]:
    return list(zip(info.inputs, info.names or [""] * len(info.inputs), strict=True))


def _noise(spec: TensorSpec, name: str, info: DataInfo, number: int, generator: torch.Generator) -> Tensor:
    shape = (number, *spec.shape)
    if spec.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(spec.dtype)
    if "mask" in name:  # what is masked altogether may have no defined result
        return torch.ones(shape, dtype=spec.dtype)
    # Numbers stand for words or categories. Only of a language model are they known to be as many as its outputs.
    most = info.outputs if info.task == "language_model" and spec.dtype != torch.bool else 2
    return torch.randint(0, max(1, most), shape, generator=generator).to(spec.dtype)
