"""Chooses the data set that a job names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from horizonml.data import own
from horizonml.data.dataset import Data, DataInfo
from horizonml.data.sampler import check_divided
from horizonml.data.spec import DataSpec
from horizonml.errors import DataError, DataOutOfMemory, is_out_of_memory


class Reader(Protocol):
    """The functions of the module that reads a source of data."""

    def describe(self, spec: DataSpec, channels: int | None, encoding: Mapping[str, Any] | None) -> DataInfo | None:
        """Return a description of the data, or None if this machine does not have it.

        `channels` is the number of colour channels that the model expects, if it takes images. With the `encoding` of a
        model that was trained before on data of this kind, content becomes numbers as it did then. Raises DataError.
        """

    def load(self, spec: DataSpec, info: DataInfo, cache: Path, inputs: bool, targets: bool) -> Data:
        """Read the wanted parts of the data set that `info` describes; downloads go to `cache`. Raises DataError.

        Without `inputs` or without `targets`, nobody asks the splits for them. Without both, nothing is read.
        """


def _reader(spec: DataSpec) -> Reader:
    return cast(Reader, import_module(spec.source.module))


def describe(spec: DataSpec, channels: int | None = None, encoding: Mapping[str, Any] | None = None) -> DataInfo | None:
    """Return a description of the data, as its `Reader` gives it. Raises DataError."""
    return _reader(spec).describe(spec, channels, encoding)


def load(spec: DataSpec, info: DataInfo, cache: Path, inputs: bool = True, targets: bool = True) -> Data:
    """Read the wanted parts of a data set, as its `Reader` does. Raises DataError."""
    try:
        return _reader(spec).load(spec, info, cache, inputs, targets)
    except Exception as error:
        if is_out_of_memory(error):
            raise DataOutOfMemory.at(f"data.name: {spec.name}") from error
        raise


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
            one, other = _words(seen[first]), _words(info)
            differs = f"rank {first} sees {one}, rank {rank} sees {other}"
            if one == other:
                differs = f"rank {rank} sees other content than rank {first}, of the same size"
            raise DataError(f"data: {differs}; give all ranks the same data")
    check_divided(spec, seen[first].train, seen[first].held_out)
    return seen[first]


def _nowhere(spec: DataSpec) -> str:
    """Return in words what no rank has."""
    if spec.source.place == "folder":
        return f"data.folder: {spec.folder} is not a directory on any rank, seen from where the command was run"
    if not spec.is_own:
        return f"data.{spec.source.place}: {spec.place} does not exist on any rank"
    try:
        own.open_own(spec)
    except FileNotFoundError as error:
        return f"data.name: no rank has the files that {spec.name} reads: {error}"
    return f"data.name: no rank has the files that {spec.name} reads"


def _words(info: DataInfo) -> str:
    shapes = " and ".join(str(list(spec.shape)) for spec in info.inputs)
    return f"{info.train} training and {info.held_out} held-out samples of shape {shapes} with {info.outputs} outputs"
