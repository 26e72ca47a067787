"""Fetches shards, which are tar files in the format of WebDataset, and reads samples out of them.

fsspec fetches them from any place that it knows: http(s), S3 and its like, or a folder. A shard is fetched once per
machine, into a cache on disk that is kept below a limit by deleting the shards that were not used for the longest time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from horizonml.errors import DataError, HorizonError
from horizonml.machine.extras import require
from horizonml.text import human_bytes

INDEX = "index.json"

_ATTEMPTS = 4  # to fetch a shard
_PAUSE = 0.5  # seconds before the second attempt; each further pause is twice as long
_TABLES = 64  # shards whose list of files is kept in memory
_NEEDS = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs"}

Place = tuple[int, int]  # where a file lies in its shard: offset and length


@dataclass(frozen=True)
class Shard:
    """Describes a shard: its name beside the index, the number of its samples, and its checksum if that is known."""

    name: str
    samples: int
    sha256: str | None = None


@dataclass(frozen=True)
class Index:
    """Describes all shards of a data set."""

    train: tuple[Shard, ...]
    held_out: tuple[Shard, ...]
    classes: Any = None  # a list of names, or a number


class Origin:
    """Knows the place where shards come from: a folder of this machine, or a URL."""

    def __init__(self, path: str) -> None:
        """Prepare to read from `path`. Raises DataError or MissingPackage."""
        self.path, protocol = path.rstrip("/"), path.partition("://")[0] if "://" in path else ""
        self.folder = Path(path) if not protocol else None
        if protocol:
            if protocol in _NEEDS:
                require(_NEEDS[protocol], f"data.path: {protocol}")
            import fsspec

            try:
                self._files, self._root = fsspec.core.url_to_fs(self.path)
            except (ValueError, ImportError) as error:
                raise DataError(f"data.path: {path}: {error}") from error

    def index(self) -> Index | None:
        """Return the description of the shards; None for a folder that lacks one. Raises FileNotFoundError."""
        if self.folder is None:
            return _parse(self._read(INDEX), self.path)
        if not self.folder.is_dir():
            raise FileNotFoundError(self.path)
        file = self.folder / INDEX
        return _parse(file.read_bytes(), self.path) if file.is_file() else None

    def _read(self, name: str) -> bytes:
        try:
            content: bytes = self._files.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            raise
        except Exception as error:  # every kind of file system has errors of its own
            raise DataError(f"data.path: {self.path}/{name} cannot be fetched: {_words(error)}") from error
        return content

    def fetch(self, shard: Shard, into: Path) -> None:
        """Copy a shard into a file. Raises DataError."""
        problem = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE * 2 ** (attempt - 1))
            try:
                self._files.get_file(f"{self._root}/{shard.name}", str(into))
            except Exception as error:  # noqa: BLE001  (every kind of file system has errors of its own)
                problem = _words(error)
                continue
            found = _checksum(into) if shard.sha256 is not None else None
            if found == shard.sha256:
                return
            problem = f"its checksum is {found}, but the index has {shard.sha256}"
        raise DataError(f"data.path: {self.path}/{shard.name} cannot be fetched, after {_ATTEMPTS} attempts: {problem}")


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parse(content: bytes, place: str) -> Index:
    """Return what an index says; the index of WebDataset's `wids` is understood, too. Raises DataError."""
    try:
        value = json.loads(content)
        train, held_out = value.get("train", value.get("shardlist")), value.get("held_out", [])
        lists = [tuple(map(_shard, part)) for part in (train, held_out)]
        if any("/" in shard.name or not shard.name.endswith(".tar") for part in lists for shard in part):
            raise ValueError("every shard must be a .tar file beside the index")
        return Index(lists[0], lists[1], value.get("classes"))
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"data.path: {place}/{INDEX} is no index of shards: {error}") from error


def _shard(entry: Mapping[str, Any]) -> Shard:
    name, samples = entry.get("name", entry.get("url")), entry.get("samples", entry.get("nsamples"))
    checksum = entry.get("sha256")
    return Shard(str(name), int(str(samples)), None if checksum is None else str(checksum))


def write_index(folder: Path, held_out: Sequence[str] = (), classes: Sequence[str] | int | None = None) -> Path:
    """Describe all shards of a folder in a file beside them, and return it; `held_out` names those to evaluate on."""
    found: dict[str, Any] = {"train": [], "held_out": []}
    for file in sorted(folder.glob("*.tar")):
        entry = {"name": file.name, "samples": len(table_of(file)), "sha256": _checksum(file)}
        found["held_out" if file.name in held_out else "train"].append(entry)
    path = folder / INDEX
    path.write_text(json.dumps(found | ({} if classes is None else {"classes": classes}), indent=1))
    return path


def table_of(path: Path) -> list[Mapping[str, Place]]:
    """Return for each sample of a shard where its files lie, by extension. Raises DataError."""
    samples: dict[str, dict[str, Place]] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.isfile():
                    folder, _, base = member.name.rpartition("/")
                    key, _, extension = base.partition(".")
                    samples.setdefault(f"{folder}/{key}", {})[extension.lower()] = (member.offset_data, member.size)
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"data.path: {path} is damaged: {error}") from error
    return list(samples.values())


class Cache:
    """Provides shards as files of this machine; those that were fetched take at most `limit` bytes together."""

    def __init__(self, origin: Origin, folder: Path, limit: int) -> None:
        """Prepare the cache in `folder`, which all ranks of a machine share."""
        self._origin, self._limit = origin, limit
        self._folder = folder / f"shards-{hashlib.sha256(origin.path.encode()).hexdigest()[:16]}"
        self._tables: OrderedDict[str, list[Mapping[str, Place]]] = OrderedDict()
        self._lock = threading.Lock()
        self._ahead = ThreadPoolExecutor(2, "fetch") if origin.folder is None else None
        self._expected: set[str] = set()

    def read(self, shard: Shard, sample: int, extensions: Sequence[str]) -> dict[str, bytes]:
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

    def _part(self, file: Any, table: Sequence[Mapping[str, Place]], shard: Shard, sample: int, name: str) -> bytes:
        if sample >= len(table) or name not in table[sample]:
            has = f"has the files {', '.join(table[sample])}" if sample < len(table) else "is not there"
            raise DataError(f"{shard.name}: sample {sample} of it {has}, but {name!r} is needed")
        offset, size = table[sample][name]
        file.seek(offset)
        content: bytes = file.read(size)
        return content

    def _table(self, shard: Shard, path: Path) -> list[Mapping[str, Place]]:
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

    def _get(self, shard: Shard) -> Path:
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
                    self._origin.fetch(shard, part)
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
        for file in self._folder.glob("*.tar"):
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

    def expect(self, shards: Sequence[Shard]) -> None:
        """Begin to fetch shards that are needed soon."""
        if self._ahead is None:
            return
        names = {shard.name for shard in shards}
        new = [shard for shard in shards if shard.name not in self._expected]
        self._expected = names
        for shard in new:
            self._ahead.submit(self._fetch_quietly, shard)

    def _fetch_quietly(self, shard: Shard) -> None:
        """Fetch a shard; a problem with it is told to the one who needs it, who tries again."""
        with suppress(HorizonError):
            self._get(shard)

    def close(self) -> None:
        """Give up what nobody has begun to fetch."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=False, cancel_futures=True)
