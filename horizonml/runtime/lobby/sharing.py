"""Hands out the files of a data set, in small pieces, to devices that do not have them.

The list of files, with their sizes and hashes, is made in a thread, because hashing a large data set takes a while.
Links are left out, because they may lead anywhere.

Checks names of files that another device has sent, so that nothing is written anywhere but where it belongs.

Makes of a job what all devices of a run train, whoever they are and however many.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import secrets
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import yaml

from horizonml.errors import DataError, JobError
from horizonml.files import write_atomically
from horizonml.job.jobfile import changed
from horizonml.job.schema import Job
from horizonml.rendezvous.checks import Fields, whole
from horizonml.runtime.lobby.messages import MOST_CHUNK, MOST_JOB
from horizonml.text import count

MOST_FILES = 200_000
_MOST_PAGE = 100  # files in one reply
_MOST_OFFSET = 1 << 60


@dataclass(frozen=True)
class Item:
    """A file: its name below the folder, its bytes, and their SHA-256."""

    name: str
    size: int
    sha256: str


class Shelf:
    """Holds the files that are shared."""

    def __init__(self, root: Path) -> None:
        """Look for the files, and begin to hash them. Raises DataError if a name cannot travel, or there is nothing."""
        self._single = root.is_file()
        self._paths = _paths(root)
        self._sizes = {name: path.stat().st_size for name, path in self._paths.items()}
        self.bytes = sum(self._sizes.values())
        self.left_out = sum(path.is_symlink() for path in root.rglob("*")) if root.is_dir() else 0
        self._items: list[Item] = []
        self._hashed = 0
        self._problem = ""
        self._ready = threading.Event()
        threading.Thread(target=self._hash, name="hashing", daemon=True).start()

    @property
    def files(self) -> int:
        """Return how many files there are."""
        return len(self._paths)

    def answer(self, request: Fields) -> Fields:
        """Return a page of the list (`list`), or a piece of a file (`file`, `from`). Raises ValueError."""
        if self._problem:
            raise ValueError(self._problem)
        if not self._ready.is_set():
            return {"ready": False, "done": self._hashed, "bytes": self.bytes}
        if "list" in request:
            first = whole(request, "list", 0, MOST_FILES)
            page = [[item.name, item.size, item.sha256] for item in self._items[first : first + _MOST_PAGE]]
            whole_list = {"count": len(self._items), "bytes": self.bytes, "single": self._single}
            return {"ready": True, "files": page, **whole_list}
        number = whole(request, "file", 0, len(self._items) - 1)
        return {"piece": self._read(self._items[number], whole(request, "from", 0, _MOST_OFFSET))}

    def _read(self, item: Item, start: int) -> str:
        """Return a piece of a file. Raises ValueError if it cannot be read or is not what it was."""
        try:
            with self._paths[item.name].open("rb") as file:
                if os.fstat(file.fileno()).st_size != item.size:
                    raise ValueError(f"{item.name} has changed while it was shared")
                file.seek(start)
                return base64.b64encode(file.read(MOST_CHUNK)).decode()
        except OSError as error:
            raise ValueError(f"{item.name} cannot be read: {error.strerror or error}") from None

    def _hash(self) -> None:
        """Hash all files."""
        for name, path in self._paths.items():
            digest, size = hashlib.sha256(), 0
            try:
                with path.open("rb") as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
                        size += len(block)
                        self._hashed += len(block)
            except OSError as error:
                self._problem = f"{name} cannot be read: {error.strerror or error}"
                return
            if size != self._sizes[name]:
                self._problem = f"{name} has changed while it was shared"
                return
            self._items.append(Item(name, size, digest.hexdigest()))
        self._ready.set()


def _paths(root: Path) -> dict[str, Path]:
    """Return the regular files below a folder, or the one file, by their names. Raises DataError."""
    if root.is_file():
        found = {root.name: root}
    else:
        found = {
            path.relative_to(root).as_posix(): path
            for path in sorted(root.rglob("*"))
            if not path.is_symlink() and stat.S_ISREG(path.stat().st_mode) and not _hidden(path.relative_to(root))
        }
    if not found:
        raise DataError(f"--share-data: there are no files in {root}")
    if len(found) > MOST_FILES:
        raise DataError(f"--share-data: {root} has more than {MOST_FILES:,} files; copy them to the devices yourself")
    for name in found:
        try:
            check_name(name)
        except ValueError as error:
            raise DataError(f"--share-data: {error}; rename it, or copy the data to the devices yourself") from None
    return found


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


_MOST_NAME, _MOST_PART, _MOST_DEEP = 1000, 200, 32  # characters, and folders
# Letters and digits of any script; none of the characters that a shell, a file system or a terminal takes for its own.
_PART = re.compile(r"[\w(\[][\w .,+=@()\[\]&%#'-]*")
_RESERVED = {"con", "prn", "aux", "nul"}  # of Windows, with whatever ending


def check_name(name: object) -> PurePosixPath:
    """Return the path, below a folder, that a name from elsewhere stands for. Raises ValueError.

    Refused are absolute paths, "..", hidden files, control characters and other odd ones, and names that are too long.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME:
        raise ValueError(f"the name of a file must be a text of 1 to {_MOST_NAME} characters")
    parts = name.split("/")
    if len(parts) > _MOST_DEEP:
        raise ValueError(f"the file {name[:60]!a} ... lies in more than {_MOST_DEEP} folders")
    for part in parts:
        fits = len(part.encode()) <= _MOST_PART and _PART.fullmatch(part) is not None and part.isprintable()
        if not fits or part.endswith((" ", ".")) or part.partition(".")[0].lower() in _RESERVED:
            raise ValueError(f"{name[:60]!a} cannot be the name of a file from another device")
    return PurePosixPath(*parts)


MOST_WORKERS = 64  # that may take part unless the job says it
_LINEAGE = Path(".places") / "lineage"  # within a run's folder, where it survives `--fresh`


@dataclass(frozen=True)
class Offer:
    """A job as it is handed to the devices that come."""

    job: Job
    text: str  # of the job, without what concerns only the device that offers it
    lineage: str  # identifies a training through all its continuations
    exactly: int | None  # the devices that the job's plan is for, if it has one
    most: int  # devices that may take part

    @property
    def name(self) -> str:
        """Return the name of the job."""
        return self.job.name

    @property
    def least(self) -> int:
        """Return the devices without which training does not begin."""
        return self.job.parallel.min_world_size()


def offer(job: Job, lineage: str) -> Offer:
    """Return what devices are given of a job, whose world size is open. Raises JobError."""
    parallel = job.parallel
    exactly = parallel.world_size() if parallel.stages is not None else None
    changes: dict[str, object] = {"rendezvous.address": None, "parallel.workers": None}
    if exactly is None:
        strategy = "auto" if parallel.strategy == "single" else parallel.strategy
        changes |= {
            "parallel.strategy": strategy,
            "parallel.min_workers": parallel.min_workers or (3 if strategy == "hybrid" else 1),
            "parallel.max_workers": parallel.max_workers
            or max(MOST_WORKERS, parallel.workers or 1, parallel.min_workers or 1),
        }
    own = changed(job, changes)
    text = job_text(changed(own, {"folder": None}))
    if len(text) > MOST_JOB:
        raise JobError(f"{job.name}: the job has {len(text):,} characters, and at most {MOST_JOB:,} travel to devices")
    return Offer(own, text, lineage, exactly, exactly or own.parallel.max_workers or MOST_WORKERS)


def job_text(job: Job) -> str:
    """Return a job as the text of a job file."""
    return yaml.safe_dump(job.model_dump(exclude_none=True), sort_keys=False)


def check_wanted(offered: Offer, wanted: int | None) -> None:
    """Raise JobError if a run cannot begin with so many devices."""
    if wanted is None:
        return
    if offered.exactly is not None and wanted != offered.exactly:
        raise JobError(
            f"--workers: {wanted}, but parallel.stages is a plan for exactly {count(offered.exactly, 'device')}; give "
            f"--workers {offered.exactly}, or leave out the stages"
        )
    if wanted < offered.least:
        raise JobError(
            f"--workers: {wanted}, but the job needs at least {count(offered.least, 'device')} (parallel.min_workers); "
            "change one of them"
        )
    if wanted > offered.most:
        raise JobError(
            f"--workers: {wanted}, but the job takes at most {offered.most} (parallel.max_workers); raise that"
        )


def lineage_of(folder: Path, fresh: bool) -> str:
    """Return the lineage of the training that a run in this folder continues, or a new one if it begins one."""
    try:
        known = (folder / _LINEAGE).read_text().strip()
    except OSError:
        known = ""
    return secrets.token_hex(16) if fresh or not known else known


def note_lineage(folder: Path, lineage: str) -> None:
    """Remember the lineage of what a run's folder holds. Raises OSError."""
    write_atomically(folder / _LINEAGE, lineage.encode())


def is_of(folder: Path, lineage: str) -> bool:
    """Return whether a folder holds a part of a training of this lineage, or nothing yet."""
    try:
        return (folder / _LINEAGE).read_text().strip() == lineage
    except OSError:
        return not has_records(folder)


def has_records(folder: Path) -> bool:
    """Return whether a folder holds what a run has left there."""
    patterns: Sequence[str] = ("rank-*.jsonl", "checkpoints/step-*")
    return any(any(folder.glob(pattern)) for pattern in patterns)
