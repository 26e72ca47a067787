"""Provides data sets that do not fit a device's disk: samples in shards, which are fetched while training.

Samples have indices like those of any other data set, so every plan trains on the same ones, and a run that is resumed
in the middle of an epoch goes on with the shard that it would have needed. `ShardSampler` keeps the samples that follow
one another within a few shards.
"""

from __future__ import annotations

import io
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from horizonml.data import own
from horizonml.data.dataset import Data, DataInfo
from horizonml.data.origin import Index, Origin, Shard
from horizonml.data.own import Opened
from horizonml.data.pictures import PHOTO_SIZE, photo_of, read_picture
from horizonml.data.samples import tree_of
from horizonml.data.shards import Cache, table_of
from horizonml.data.spec import DataSpec
from horizonml.errors import DataError, is_out_of_memory
from horizonml.files import cache_folder

MIXED = 4  # shards whose samples are shuffled together

_PICTURES = ("jpg", "jpeg", "png", "webp", "bmp")
_MOST_REASON = 200  # characters
_CLASSES = ("cls", "index", "id")


def describe(spec: DataSpec) -> DataInfo | None:
    """Return a description of the stream, or None if this machine does not reach its index. Raises DataError."""
    info = own.describe(spec, open_stream)
    return None if info is None else replace(info, shards=tuple(shard.samples for shard in _index(spec).train))


def load(spec: DataSpec, info: DataInfo, inputs: bool, targets: bool) -> Data:
    """Open the stream that `info` describes. Raises DataError."""
    return own.load(spec, info, open_stream, inputs, targets)


def open_stream(spec: DataSpec) -> Opened:
    """Return the training and the held-out samples. Raises DataError, or FileNotFoundError."""
    index = _index(spec)
    cache = Cache(Origin(spec.path or ""), cache_folder() / "data", spec.disk)
    train, held_out = (Samples(shards, cache, spec, index.classes) for shards in (index.train, index.held_out))
    return Opened(train, held_out, f"data.path: {spec.path}")


def _index(spec: DataSpec) -> Index:
    """Return all shards, some of which are held out. Raises DataError, or FileNotFoundError."""
    origin = Origin(spec.path or "")
    index = origin.index()
    if index is None:
        assert origin.folder is not None
        files = sorted(origin.folder.glob("*.tar"))
        index = Index(tuple(Shard(file.name, len(table_of(file))) for file in files), ())
    if not index.held_out:
        count = max(1, round(len(index.train) * spec.holdout))
        index = replace(index, train=index.train[:-count], held_out=index.train[-count:])
    if not index.train:
        raise DataError(
            f"data.path: {spec.path} has too few shards: at least one to train on and one to evaluate on are needed. "
            "You can write them with webdataset's ShardWriter"
        )
    return index


class Samples:
    """Provides the samples of some shards by index."""

    def __init__(self, shards: Sequence[Shard], cache: Cache, spec: DataSpec, classes: Any) -> None:
        """Count the samples."""
        self._shards, self._cache, self._spec, self.classes = shards, cache, spec, classes
        self._stops = list(accumulate(shard.samples for shard in shards))
        self._inputs, self._targets = list(spec.inputs or ()), list(spec.targets or ())

    @property
    def reach(self) -> int:
        """Return how many samples ahead a shard should be fetched."""
        return MIXED * max(shard.samples for shard in self._shards)

    def expect(self, indices: Sequence[int]) -> None:
        """Begin to fetch the shards of samples that are needed soon."""
        places = sorted({bisect_right(self._stops, index) for index in indices})
        self._cache.expect([self._shards[place] for place in places])

    def __len__(self) -> int:
        return self._stops[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        files = self._read(index, [*self._inputs, *self._targets])
        return {"inputs": self._join(files, self._inputs), "targets": self._join(files, self._targets)}

    def input(self, index: int) -> Any:
        """Return what the model gets of a sample, without reading the rest."""
        return self._join(self._read(index, self._inputs), self._inputs)

    def target(self, index: int) -> Any:
        """Return what is learned of a sample, without reading the rest."""
        return self._join(self._read(index, self._targets), self._targets)

    def _read(self, index: int, extensions: Sequence[str]) -> dict[str, bytes]:
        place = bisect_right(self._stops, index)
        shard = self._shards[place]
        return self._cache.read(shard, index - self._stops[place] + shard.samples, extensions)

    def _join(self, files: dict[str, bytes], names: Sequence[str]) -> Any:
        values = {name: self._decode(name, files[name]) for name in names}
        return next(iter(values.values())) if len(values) == 1 else values

    def _decode(self, name: str, content: bytes) -> Any:
        """Return a file's content as tensors. Raises DataError."""
        kind = name.rpartition(".")[2]
        try:
            if kind in _PICTURES:
                return self._photo(content)
            if kind in _CLASSES:
                return torch.tensor(int(content))
            if kind == "json":
                return tree_of(json.loads(content), f"a .{name} file")
            if kind == "npy":
                return _array(content)
        except DataError as error:
            raise DataError(f"its .{name} file cannot be used: {error}") from error
        except Exception as error:  # readers fail on damaged files in any way
            if is_out_of_memory(error):
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:_MOST_REASON]
            raise DataError(f"its .{name} file is damaged: {reason}") from error
        known = ", ".join((*_PICTURES, *_CLASSES, "json", "npy"))
        raise DataError(f"data.inputs: .{name} files cannot be read; use one of {known}")

    def _photo(self, content: bytes) -> Tensor:
        size, channels = self._spec.image_size or PHOTO_SIZE, self._spec.channels or 3
        return read_picture(io.BytesIO(content), lambda image: photo_of(image, size, channels))


def _array(content: bytes) -> Any:
    """Return an array of numpy's format, whose header must not promise more than there is. Raises ValueError."""
    import numpy
    from numpy.lib import format as npy

    file = io.BytesIO(content)
    version = npy.read_magic(file)
    header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if header is None:
        raise ValueError(f"its format is version {version[0]}.{version[1]}, which numpy does not write for numbers")
    shape, _, kind = header(file)
    if kind.hasobject:
        raise ValueError("it holds objects of Python, and no code is run from such a file")
    if math.prod(shape) * kind.itemsize > len(content):
        raise ValueError(f"it promises an array of shape {list(shape)}, and is too short for that")
    return numpy.load(io.BytesIO(content), allow_pickle=False)
