"""Chooses the data set that a job names."""

from __future__ import annotations

from pathlib import Path

from horizonml.data import images, text
from horizonml.data.dataset import Data, DataInfo
from horizonml.data.spec import DataSpec
from horizonml.errors import DataError


def describe(spec: DataSpec, channels: int | None = None) -> DataInfo | None:
    """Return a description of the data, or None if this machine does not have it.

    `channels` is the number of colour channels that the model expects, if it takes images. Raises DataError.
    """
    return text.describe(spec) if spec.name == "text" else images.describe(spec, channels)


def load(spec: DataSpec, info: DataInfo, cache: Path, inputs: bool = True, targets: bool = True) -> Data:
    """Read the wanted parts of the data set that `info` describes; downloads go to `cache`. Raises DataError."""
    return text.load(spec, info) if spec.name == "text" else images.load(spec, info, cache, inputs, targets)


def agree(found: list[DataInfo | None], spec: DataSpec) -> DataInfo:
    """Return the one description that all ranks that see the data agree on. Raises DataError if they differ."""
    seen = {rank: info for rank, info in enumerate(found) if info is not None}
    if not seen:
        if spec.name == "text":
            raise DataError(f"data.path: {spec.path} is not a file on any rank")
        raise DataError(f"data.folder: {spec.folder} is not a directory on any rank")
    first = min(seen)
    for rank, info in seen.items():
        if info != seen[first]:
            raise DataError(
                f"data: rank {first} sees {_words(seen[first])}, rank {rank} sees {_words(info)}; "
                "give all ranks the same data"
            )
    return seen[first]


def _words(info: DataInfo) -> str:
    shapes = " and ".join(str(list(spec.shape)) for spec in info.inputs)
    return f"{info.train} training and {info.held_out} held-out samples of shape {shapes} with {info.outputs} outputs"
