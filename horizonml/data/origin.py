"""Fetches the index and the shards of a stream from the place where they lie: http(s), S3 and its like, or a folder.

fsspec knows how to ask each kind of server, and many other things, of which none is needed here. A server that is away
for a while is asked again, up to a limit.
"""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizonml.errors import DataError, HorizonError
from horizonml.files import checksum, safe_name
from horizonml.machine.code import require
from horizonml.machine.network import SPARE_BYTES, http_session, is_confined, reason
from horizonml.spec.base import check_url, is_place_elsewhere
from horizonml.text import human_bytes

INDEX = "index.json"

_PATIENCE = 30.0  # seconds for which a file is asked for again and again while the server does not give it
_PAUSE = 0.5  # seconds before the second attempt; each further pause is twice as long,
_LONGEST_PAUSE = 2.0  # up to this
_CONNECT, _SILENCE = 10.0, 30.0  # seconds to wait for a connection, and for the next bytes that come through it
_MOST_INDEX = 64 << 20  # bytes of an index
_MOST_SHARD = 1 << 40  # bytes of a shard
_MOST_SAMPLES = 1 << 32  # of all shards together
_DOWNLOADS = 3  # of a shard whose checksum is wrong
_NEEDS = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs"}
_FSSPEC = (2026, 6)  # older ones run templates that a chained URL names
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of this machine's disk, and not of the server


@dataclass(frozen=True)
class StreamShard:
    """Describes a shard: its name beside the index, the number of its samples, and its checksum if that is known."""

    name: str
    samples: int
    sha256: str | None = None


@dataclass(frozen=True)
class Index:
    """Describes all shards of a data set."""

    train: tuple[StreamShard, ...]
    held_out: tuple[StreamShard, ...]
    classes: Any = None  # a list of names, or a number


class Origin:
    """Knows the place where shards come from: a folder of this machine, or a URL."""

    def __init__(self, path: str, patience: float = _PATIENCE) -> None:
        """Prepare to read from `path`, for up to `patience` seconds a file. Raises DataError or MissingPackage."""
        self._patience = patience
        self.path = path.rstrip("/")
        self.folder = Path(path) if not is_place_elsewhere(path) else None
        if self.folder is None:
            protocol = path.partition("://")[0]
            try:
                check_url(path, tuple(_NEEDS))
                require(_NEEDS[protocol], f"data.path: {protocol}")
                self._files = _fsspec().filesystem(protocol, **_options(protocol))
            except (ValueError, ImportError) as error:
                raise DataError(f"data.path: {path}: {error}") from error
            self._root = self._files._strip_protocol(self.path)

    def index(self) -> Index | None:
        """Return the description of the shards; None for a folder that lacks one. Raises FileNotFoundError."""
        if self.folder is None:
            content = self._patiently(INDEX, self._read_index, self._patience)
            return _parse(content, self.path)
        if not self.folder.is_dir():
            raise FileNotFoundError(self.path)
        file = self.folder / INDEX
        return _parse(_read(file.open("rb")), self.path) if file.is_file() else None

    def _read_index(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            self._get(INDEX, Path(folder) / INDEX, _MOST_INDEX, "data.path")
            return _read((Path(folder) / INDEX).open("rb"))

    def _get(self, name: str, into: Path, most: int, limit: str) -> None:
        """Copy a file of at most so many bytes; whoever sends it does not decide on its size. Raises DataError."""
        from fsspec.callbacks import Callback

        class Limit(Callback):  # type: ignore[misc,unused-ignore]
            """Ends a transfer that goes on for too long."""

            def relative_update(self, inc: int = 1) -> None:
                self.value += inc
                if self.value > most:
                    raise DataError(
                        f"{limit}: {human_bytes(most)} cannot hold {name}; raise the limit, or make it smaller"
                    )
                if name != INDEX and shutil.disk_usage(into.parent).free < SPARE_BYTES:
                    raise OSError(errno.ENOSPC, f"less than {human_bytes(SPARE_BYTES)} are left on that disk")

        try:
            self._files.get_file(f"{self._root}/{name}", str(into), callback=Limit())
        except BaseException:
            into.unlink(missing_ok=True)
            raise

    def fetch(self, shard: StreamShard, into: Path, patient: bool = True, most: int = _MOST_SHARD) -> None:
        """Copy a shard of at most so many bytes into a file; unless `patient`, with a single attempt.

        Raises DataError.
        """
        problem = ""
        for _ in range(_DOWNLOADS if patient else 1):
            self._patiently(
                shard.name,
                lambda: self._get(shard.name, into, most, "data.disk"),
                self._patience if patient else 0.0,
            )
            found = checksum(into) if shard.sha256 is not None else None
            if found == shard.sha256:
                return
            problem = f"its checksum is {found}, but the index has {shard.sha256}"
            into.unlink(missing_ok=True)
        raise DataError(
            f"data.path: {self.path}/{shard.name} is damaged: {reason(problem)}; repair it, or write the index anew"
        )

    def _patiently(self, name: str, action: Callable[[], Any], patience: float) -> Any:
        """Return what `action` returns, which is tried again for a while if it fails. Raises DataError.

        What is not there does not come by waiting: FileNotFoundError for the index, so that other ranks may have it.
        """
        begin, pause, attempts = time.monotonic(), _PAUSE, 0
        while True:
            attempts += 1
            try:
                return action()
            except FileNotFoundError as error:
                if name == INDEX and not is_confined():
                    raise
                if name == INDEX:
                    raise DataError(self._unfetched(name, "", error)) from error
                raise DataError(f"data.path: {self.path}/{name} is not there, although the index lists it") from error
            except HorizonError:
                raise
            except Exception as error:  # every kind of file system has errors of its own
                if isinstance(error, OSError) and error.errno in _DISK:
                    raise
                left = begin + patience - time.monotonic()
                refused = isinstance(error.__cause__, PermissionError)  # which aiohttp wraps
                if left <= 0 or refused or isinstance(error, PermissionError | ValueError):
                    tried = "" if attempts == 1 else f" ({attempts} attempts in {patience:.0f} s)"
                    raise DataError(self._unfetched(name, tried, error)) from error
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _unfetched(self, name: str, tried: str, error: Exception) -> str:
        return (
            f"data.path: {self.path}/{name} cannot be fetched{tried}: {reason(_words(error))}; see whether the server "
            "is up and can be reached from here"
        )


def _fsspec() -> Any:
    """Return fsspec. Raises ImportError if its release is too old."""
    import fsspec

    if tuple(int(part) for part in fsspec.__version__.split(".")[:2]) < _FSSPEC:
        wanted = ".".join(map(str, _FSSPEC))
        raise ImportError(
            f"fsspec {fsspec.__version__} is too old to read from a URL safely: pip install 'fsspec>={wanted}'"
        )
    return fsspec


def _options(protocol: str) -> dict[str, object]:
    """Return the options of a kind of file system, so that a server that falls silent is noticed.

    Files may take as long as they need as long as something comes: fsspec's own limit for http(s) is five minutes.
    """
    if protocol in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=_SILENCE)
        return {"client_kwargs": {"timeout": timeout}, "get_client": http_session}
    if protocol == "s3":
        return {
            "config_kwargs": {"connect_timeout": _CONNECT, "read_timeout": _SILENCE, "retries": {"max_attempts": 1}}
        }
    return {}


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    cause = error.__cause__ if isinstance(error.__cause__, PermissionError) else error
    return str(cause) or type(cause).__name__


def _parse(content: bytes, place: str) -> Index:
    """Return what an index says; the index of WebDataset's `wids` is understood, too. Raises DataError."""
    try:
        value = json.loads(content)
        train, held_out = value.get("train", value.get("shardlist")), value.get("held_out", [])
        lists = [tuple(map(_shard, part)) for part in (train, held_out)]
        every = [shard for part in lists for shard in part]
        if any(not shard.name.endswith(".tar") for shard in every):
            raise ValueError("every shard must be a .tar file beside the index")
        if len({shard.name for shard in every}) < len(every):
            raise ValueError("a shard is listed twice")
        if any(shard.samples < 0 for shard in every) or sum(shard.samples for shard in every) > _MOST_SAMPLES:
            raise ValueError(f"the shards must have between 0 and {_MOST_SAMPLES:,} samples together")
        classes = value.get("classes")
        if not (classes is None or type(classes) is int or (isinstance(classes, list) and all(map(_is_name, classes)))):
            raise ValueError("classes must be a number, or a list of names")
        return Index(lists[0], lists[1], classes)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"data.path: {place}/{INDEX} is no index of shards: {reason(str(error))}") from error


def _shard(entry: Mapping[str, Any]) -> StreamShard:
    name, samples = entry.get("name", entry.get("url")), entry.get("samples", entry.get("nsamples"))
    checksum = entry.get("sha256")
    if isinstance(samples, float):
        raise ValueError(f"{samples} is not a number of samples")
    return StreamShard(safe_name(name), int(str(samples)), None if checksum is None else str(checksum))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _read(file: Any) -> bytes:
    """Return the content of an index, and close it. Raises DataError if it is too large."""
    with file:
        content: bytes = file.read(_MOST_INDEX + 1)
    if len(content) > _MOST_INDEX:
        raise DataError(f"data.path: {INDEX} is larger than {human_bytes(_MOST_INDEX)}; write larger shards")
    return content
