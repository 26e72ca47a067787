"""Chooses the data set that a job names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from horizonml.data import hub, images, own, stream, table, text
from horizonml.data.dataset import Data, DataInfo
from horizonml.data.spec import IMAGES, DataSpec
from horizonml.errors import DataError


def describe(spec: DataSpec, channels: int | None = None) -> DataInfo | None:
    """Return a description of the data, or None if this machine does not have it.

    `channels` is the number of colour channels that the model expects, if it takes images. Raises DataError.
    """
    if spec.name in IMAGES:
        return images.describe(spec, channels)
    if spec.name == "table":
        return table.describe(spec)
    if spec.name == "stream":
        return stream.describe(spec)
    if spec.name == "text":
        return text.describe(spec)
    return own.describe(spec, _opener(spec))


def load(spec: DataSpec, info: DataInfo, cache: Path, inputs: bool = True, targets: bool = True) -> Data:
    """Read the wanted parts of the data set that `info` describes; downloads go to `cache`. Raises DataError."""
    if spec.name in IMAGES:
        return images.load(spec, info, cache, inputs, targets)
    if spec.name == "table":
        return table.load(spec, info, inputs, targets)
    if spec.name == "stream":
        return stream.load(spec, info, inputs, targets)
    if spec.name == "text":
        return text.load(spec, info)
    return own.load(spec, info, _opener(spec), inputs, targets)


def _opener(spec: DataSpec) -> own.Opener:
    return own.open_own if spec.is_own else hub.open_hub


def agree(found: list[DataInfo | None], spec: DataSpec) -> DataInfo:
    """Return the one description that all ranks that see the data agree on. Raises DataError if they differ."""
    seen = {rank: info for rank, info in enumerate(found) if info is not None}
    if not seen:
        raise DataError(_nowhere(spec))
    first = min(seen)
    # What cannot be read is known only to ranks that have trained before.
    unreadable = next((info.unreadable for info in seen.values() if info.unreadable is not None), None)
    seen = {rank: replace(info, unreadable=unreadable) for rank, info in seen.items()}
    for rank, info in seen.items():
        differing = sorted(set(info.characters) ^ set(seen[first].characters))
        if differing:
            raise DataError(
                f"data.path: the texts of rank {first} and rank {rank} differ: only one of them has {differing[0]!r}; "
                "give all ranks the same file"
            )
        if info != seen[first]:
            raise DataError(
                f"data: rank {first} sees {_words(seen[first])}, rank {rank} sees {_words(info)}; "
                "give all ranks the same data"
            )
    return seen[first]


def _nowhere(spec: DataSpec) -> str:
    """Return in words what no rank has."""
    if spec.name == "folder":
        return f"data.folder: {spec.folder} is not a directory on any rank"
    if not spec.is_own:
        return f"data.path: {spec.path} is not there on any rank"
    try:
        own.open_own(spec)
    except FileNotFoundError as error:
        return f"data.name: no rank has the files that {spec.name} reads: {error}"
    return f"data.name: no rank has the files that {spec.name} reads"


def _words(info: DataInfo) -> str:
    shapes = " and ".join(str(list(spec.shape)) for spec in info.inputs)
    return f"{info.train} training and {info.held_out} held-out samples of shape {shapes} with {info.outputs} outputs"
