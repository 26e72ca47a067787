"""Provides data sets that do not fit a device's disk: samples in shards, which are fetched while training.

Samples have indices like those of any other data set, so every plan trains on the same ones, and a run that is resumed
in the middle of an epoch goes on with the shard that it would have needed. `ShardSampler` keeps the samples that follow
one another within a few shards.

Shards are tar files in the format of WebDataset. A shard is fetched once per machine, into a cache on disk that is kept
below a limit by deleting the shards that were not used for the longest time.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import tarfile
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from horizonml.data import own
from horizonml.data.dataset import Data, DataInfo
from horizonml.data.files import PHOTO_SIZE, photo_of, read_picture
from horizonml.data.origin import INDEX, Index, Origin, StreamShard
from horizonml.data.own import Opened
from horizonml.data.samples import tree_of
from horizonml.data.spec import DataSpec
from horizonml.errors import DataError, HorizonError, is_out_of_memory
from horizonml.files import cache_folder, checksum
from horizonml.machine.network import CONFINED_BYTES, is_confined
from horizonml.text import human_bytes

_TABLES = 64  # shards whose list of files is kept in memory

_MOST_FILES = 1 << 19  # of a shard

Place = tuple[int, int]  # where a file lies in its shard: offset and length


def write_index(folder: Path, held_out: Sequence[str] = (), classes: Sequence[str] | int | None = None) -> Path:
    """Describe all shards of a folder in a file beside them, and return it; `held_out` names those to evaluate on."""
    found: dict[str, list[object]] = {"train": [], "held_out": []}
    for file in sorted(folder.glob("*.tar")):
        entry = {"name": file.name, "samples": len(table_of(file)), "sha256": checksum(file)}
        found["held_out" if file.name in held_out else "train"].append(entry)
    path = folder / INDEX
    path.write_text(json.dumps(found | ({} if classes is None else {"classes": classes}), indent=1))
    return path


def table_of(path: Path) -> list[Mapping[str, Place]]:
    """Return for each sample of a shard where its files lie, by extension. Raises DataError."""
    samples: dict[str, dict[str, Place]] = {}
    total = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as archive:
            for number, member in enumerate(archive):
                archive.members = []  # type: ignore[attr-defined]  # which would hold all headers in memory
                if number >= _MOST_FILES:
                    raise DataError(f"data.path: {path} has more than {_MOST_FILES:,} files; write smaller shards")
                if member.isfile() and not member.issparse():
                    if member.size < 0 or member.offset_data + member.size > total:
                        raise DataError(f"data.path: {path} is damaged: a file in it ends after its own end")
                    folder, _, base = member.name.rpartition("/")
                    key, _, extension = base.partition(".")
                    samples.setdefault(f"{folder}/{key}", {})[extension.lower()] = (member.offset_data, member.size)
    except (DataError, FileNotFoundError):
        raise
    except Exception as error:  # headers that lie end in errors of any kind, also in requests for far too much memory
        raise DataError(f"data.path: {path} is damaged: {str(error) or type(error).__name__}") from error
    return list(samples.values())


class Cache:
    """Provides shards as files of this machine; those that were fetched take at most `limit` bytes together."""

    def __init__(self, origin: Origin, folder: Path, limit: int) -> None:
        """Prepare the cache in `folder`, which all ranks of a machine share."""
        self._origin, self._limit = origin, min(limit, CONFINED_BYTES) if is_confined() else limit
        # Jobs from the network share one limit, however many URLs they name, and leave alone what belongs to others.
        self._all = folder / "joined" if is_confined() else None
        self._folder = (self._all or folder) / f"shards-{hashlib.sha256(origin.path.encode()).hexdigest()[:16]}"
        self._tables: OrderedDict[str, list[Mapping[str, Place]]] = OrderedDict()
        self._lock = threading.Lock()
        self._ahead = ThreadPoolExecutor(2, "fetch") if origin.folder is None else None
        self._expected: set[str] = set()

    def read(self, shard: StreamShard, sample: int, extensions: Sequence[str]) -> dict[str, bytes]:
        """Return the files with these extensions of a sample, counted from 0 in its shard. Raises DataError."""
        while True:
            path = self._get(shard)
            try:
                table = self._table(shard, path)
                with path.open("rb") as file:
                    return {name: self._part(file, table, shard, sample, name) for name in extensions}
            except FileNotFoundError:  # another rank has made room for its own
                if self._origin.folder is not None:
                    raise DataError(f"data.path: {path} is gone") from None

    def _part(
        self, file: Any, table: Sequence[Mapping[str, Place]], shard: StreamShard, sample: int, name: str
    ) -> bytes:
        if sample >= len(table) or name not in table[sample]:
            has = f"has the files {', '.join(table[sample])}" if sample < len(table) else "is not there"
            raise DataError(f"{shard.name}: sample {sample} of it {has}, but {name!r} is needed")
        offset, size = table[sample][name]
        file.seek(offset)
        content: bytes = file.read(size)
        return content

    def _table(self, shard: StreamShard, path: Path) -> list[Mapping[str, Place]]:
        with self._lock:
            if shard.name in self._tables:
                self._tables.move_to_end(shard.name)
                return self._tables[shard.name]
        table = table_of(path)
        with self._lock:
            self._tables[shard.name] = table
            while len(self._tables) > _TABLES:
                self._tables.popitem(last=False)
        return table

    def _get(self, shard: StreamShard, patient: bool = True) -> Path:
        """Return the file of a shard, fetched if it is not there. Raises DataError."""
        if self._origin.folder is not None:
            return self._origin.folder / shard.name
        path = self._folder / shard.name
        try:
            os.utime(path)  # it is in use
            return path
        except FileNotFoundError:
            pass
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self._folder / f".{shard.name}.lock"):
                if not path.exists():
                    part = self._folder / f".{shard.name}.part"
                    self._origin.fetch(shard, part, patient, self._limit)
                    os.replace(part, path)
                    self._make_room(path)
        except OSError as error:
            raise DataError(
                f"data.path: {shard.name} cannot be kept in {self._folder}: {error.strerror or error}; free some space "
                "there, lower data.disk, or set HORIZONML_CACHE to another folder"
            ) from error
        return path

    def _make_room(self, newest: Path) -> None:
        """Delete the shards that were not used for the longest time, until the rest is within the limit."""
        found = []
        for file in self._folder.glob("*.tar") if self._all is None else self._all.glob("*/*.tar"):
            with suppress(FileNotFoundError):
                status = file.stat()
                found.append((file.name in self._expected, status.st_mtime, status.st_size, file))
        total = sum(size for _, _, size, _ in found)
        for _, _, size, file in sorted(found, key=lambda one: one[:2]):
            if total <= self._limit:
                return
            if file != newest:
                file.unlink(missing_ok=True)
                total -= size
        if total > self._limit:
            raise DataError(
                f"data.disk: {human_bytes(self._limit)} cannot hold {newest.name} of {human_bytes(total)}; raise it"
            )

    def expect(self, shards: Sequence[StreamShard]) -> None:
        """Begin to fetch shards that are needed soon."""
        if self._ahead is None:
            return
        names = {shard.name for shard in shards}
        new = [shard for shard in shards if shard.name not in self._expected]
        self._expected = names
        for shard in new:
            self._ahead.submit(self._fetch_quietly, shard)

    def _fetch_quietly(self, shard: StreamShard) -> None:
        """Fetch a shard; a problem with it is told to the one who needs it, who tries again."""
        with suppress(HorizonError):
            self._get(shard, patient=False)

    def close(self) -> None:
        """Give up what nobody has begun to fetch."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=False, cancel_futures=True)


MIXED = 4  # shards whose samples are shuffled together

_PICTURES = ("jpg", "jpeg", "png", "webp", "bmp")
_MOST_REASON = 200  # characters
_CLASSES = ("cls", "index", "id")


def describe(spec: DataSpec, channels: int | None = None, encoding: Mapping[str, Any] | None = None) -> DataInfo | None:
    """Return a description of the stream, or None if this machine does not reach its index. Raises DataError."""
    info = own.describe_opened(spec, open_stream)
    return None if info is None else replace(info, shards=tuple(shard.samples for shard in _index(spec).train))


def load(spec: DataSpec, info: DataInfo, cache: Path, inputs: bool, targets: bool) -> Data:
    """Open the stream that `info` describes. Raises DataError."""
    return own.load_opened(spec, info, open_stream, inputs, targets)


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
        index = Index(tuple(StreamShard(file.name, len(table_of(file))) for file in files), ())
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

    def __init__(self, shards: Sequence[StreamShard], cache: Cache, spec: DataSpec, classes: Any) -> None:
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

    def __getitem__(self, index: int) -> dict[str, object]:
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
