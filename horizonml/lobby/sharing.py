"""Hands out the files of a data set, in small pieces, to devices that do not have them.

The list of files, with their sizes and hashes, is made in a thread, because hashing a large data set takes a while.
Links are left out, because they may lead anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

from horizonml.errors import DataError
from horizonml.lobby.messages import MOST_CHUNK
from horizonml.lobby.names import check_name
from horizonml.rendezvous.checks import Fields, whole

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
