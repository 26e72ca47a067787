"""Sends the files of a data set, in small pieces, to devices that do not have them, and fetches them there.

The list of files, with their sizes and hashes, is made in a thread, because hashing a large data set takes a while.
Links are left out, because they may lead anywhere. Whoever fetches checks the names, so that nothing is written
anywhere but where it belongs, and gets all files intact, or none.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from horizonml.errors import DataError
from horizonml.files import checksum
from horizonml.machine.network import SPARE_BYTES
from horizonml.rendezvous.device_messages import MOST_CHUNK, MOST_FILES, FilesPage, FilesRequest, Piece
from horizonml.rendezvous.wire import Fields, fields_of, read
from horizonml.text import human_bytes

Ask = Callable[[Fields], Fields]
_MOST_PAGE = 100  # files in one reply
_MOST_BYTES = 1 << 50
_PATIENCE_SECONDS = 60.0  # for a device that hashes its files, and gets no further
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Item:
    """A file: its name below the folder, its bytes, and their SHA-256."""

    name: str
    size: int
    sha256: str


class FileServer:
    """The files that this device shares."""

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

    def answer(self, request: FilesRequest) -> FilesPage | Piece:
        """Return a page of the list, or a piece of a file. Raises ValueError."""
        if self._problem:
            raise ValueError(self._problem)
        if not self._ready.is_set():
            return FilesPage(done=self._hashed, bytes=self.bytes)
        if request.file is None:
            first = request.list or 0
            page = [[item.name, item.size, item.sha256] for item in self._items[first : first + _MOST_PAGE]]
            return FilesPage(True, self._hashed, self.bytes, len(self._items), self._single, page)
        if request.file >= len(self._items):
            raise ValueError(f"there are {len(self._items)} files")
        return Piece(self._read(self._items[request.file], request.start))

    def _read(self, item: Item, start: int) -> str:
        try:
            with self._paths[item.name].open("rb") as file:
                if os.fstat(file.fileno()).st_size != item.size:
                    raise ValueError(f"{item.name} has changed while it was shared")
                file.seek(start)
                return base64.b64encode(file.read(MOST_CHUNK)).decode()
        except OSError as error:
            raise ValueError(f"{item.name} cannot be read: {error.strerror or error}") from None

    def _hash(self) -> None:
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


class Listing:
    """What another device shares."""

    def __init__(self, items: list[Item], single: bool) -> None:
        """`single` says that it is one file, and not a folder."""
        self.items, self.single = items, single
        self.bytes = sum(item.size for item in items)

    @property
    def id(self) -> str:
        """Return what identifies exactly these files."""
        lines = (f"{item.sha256} {item.size} {item.name}\n" for item in sorted(self.items, key=lambda one: one.name))
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def listing(ask: Ask, wait: Callable[[int, int], None], patience: float = _PATIENCE_SECONDS) -> Listing:
    """Return what is shared; `wait` is called with the bytes hashed so far and all of them.

    Raises DataError, also if the other device has hashed nothing more for some seconds.
    """

    def page(first: int) -> FilesPage:
        return read(FilesPage, ask(fields_of(FilesRequest(list=first), "data")))

    most, until = -1, time.monotonic() + patience
    try:
        while not (found := page(0)).ready:
            if found.done > most:
                most, until = found.done, time.monotonic() + patience
            elif time.monotonic() > until:
                raise DataError(
                    f"the list of the files that are shared is not ready: for {patience:.0f} s the other device has "
                    f"not hashed more than {human_bytes(found.done)} of {human_bytes(found.bytes)}; see whether its "
                    "disk answers"
                )
            wait(found.done, found.bytes)
        announced, size, single = found.count, found.bytes, found.single
        items: list[Item] = []
        while len(items) < announced:
            found = found if not items else page(len(items))
            if not 0 < len(found.files) <= announced - len(items):
                raise ValueError("its list of files does not have as many as it says")
            items.extend(map(_item, found.files))
        everything = Listing(items, single and announced == 1)
        if everything.bytes != size or not items:
            raise ValueError(f"its files have {everything.bytes:,} bytes, and it said {size:,}")
        names = [item.name.casefold() for item in items]
        if len(set(names)) < len(names):
            raise ValueError("two of its files have one name")
        return everything
    except ValueError as error:
        raise DataError(f"the data that is shared is refused: {error}") from None


def check_space(found: Listing, folder: Path) -> None:
    """Raise DataError unless the disk has room for the files."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if found.bytes + SPARE_BYTES > free:
        raise DataError(
            f"the data takes {human_bytes(found.bytes)}, and {place} has {human_bytes(free)} free, of which "
            f"{human_bytes(SPARE_BYTES)} stay free; make room, or let $HORIZONML_CACHE name a folder on another disk"
        )


def fetch(ask: Ask, found: Listing, folder: Path, done: Callable[[int], None]) -> Path:
    """Fetch the files into a folder of their own within `folder`, and return where they lie. Raises DataError.

    Files that were fetched before are not fetched again. `done` is called with the bytes that are there so far.
    """
    target, partial = folder / found.id, folder / f"{found.id}.partial"
    if target.is_dir():
        return _root(target, found)
    check_space(found, folder)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        there = 0
        for number, item in enumerate(found.items):
            path = partial / check_name(item.name)
            if not _intact(path, item):
                path.parent.mkdir(parents=True, exist_ok=True)
                _fetch_one(ask, number, item, path, there, done)
            there += item.size
            done(there)
        os.replace(partial, target)
    except OSError as error:
        raise DataError(f"the data cannot be written to {partial}: {error.strerror or error}") from error
    return _root(target, found)


def _root(target: Path, found: Listing) -> Path:
    return target / found.items[0].name if found.single else target


def _fetch_one(ask: Ask, number: int, item: Item, path: Path, before: int, done: Callable[[int], None]) -> None:
    """Fetch one file, which appears under its name once it is complete. Raises DataError, OSError."""
    digest, draft = hashlib.sha256(), path.with_name(f"{path.name}.part")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
        size = 0
        while size < item.size:
            answer = ask(fields_of(FilesRequest(file=number, start=size), "data"))
            try:
                piece = read(Piece, answer).piece
            except ValueError as error:
                raise DataError(f"the data that is shared is refused: of {item.name}, {error}") from None
            try:
                content = base64.b64decode(piece, validate=True)
            except binascii.Error:
                content = b""
            if not content or size + len(content) > item.size:
                raise DataError(f"the data that is shared is refused: {item.name} does not have {item.size:,} bytes")
            file.write(content)
            digest.update(content)
            size += len(content)
            done(before + size)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != item.sha256:
        draft.unlink()
        raise DataError(f"the data that is shared is refused: {item.name} is not what its SHA-256 says; try again")
    os.replace(draft, path)


def _intact(path: Path, item: Item) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != item.size:
        return False
    return checksum(path) == item.sha256


def _item(value: object) -> Item:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError("an entry of its list is not that of a file")
    name, size, digest = value
    check_name(name)
    if type(size) is not int or not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"{name!a} has no size")
    if not isinstance(digest, str) or _HASH.fullmatch(digest) is None:
        raise ValueError(f"{name!a} has no SHA-256")
    return Item(name, size, digest)
