"""Names files safely, and writes them so that a crash leaves the old content or the new, and never half of one."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from horizonml.errors import JobError

_SCRATCH = "horizonml-run-"
MOST_NAME = 200  # bytes of a name from elsewhere: file systems allow 255, and drafts and locks have longer names


def safe_name(name: object) -> str:
    """Return a name from elsewhere if it can only be that of a visible file in the folder it is put into.

    It is no path, neither hidden nor too long, and has no control characters. Raises ValueError.
    """
    if not isinstance(name, str) or not name or len(name.encode(errors="replace")) > MOST_NAME:
        raise ValueError(f"{ascii(name)[:80]} is not the name of a file, of at most {MOST_NAME} bytes")
    if name.startswith(".") or not name.isprintable() or any(separator in name for separator in "/\\:"):
        raise ValueError(f"{name!a} is not a plain name of a file: it is hidden, a path, or not printable")
    return name


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def inside(folder: Path, name: object) -> Path:
    """Return the path of a file in a folder, for a name from elsewhere.

    Raises ValueError if the name is not plain, or that of a symbolic link to somewhere outside of the folder.
    """
    path = folder / safe_name(name)
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path} is a link to somewhere outside of {folder}")
    return path


def cache_folder() -> Path:
    """Return the folder for downloads and profiles: $HORIZONML_CACHE, or else one in the user's cache directory.

    Raises JobError for a folder that anyone could have made, and somebody else has.
    """
    if os.environ.get("HORIZONML_CACHE"):
        return Path(os.environ["HORIZONML_CACHE"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "horizonml"
    try:
        return Path.home() / ".cache" / "horizonml"
    except RuntimeError:  # a user without a home, as in some containers
        return own_temporary()


def hub_cache() -> Path:
    """Return the folder of this user's Hugging Face cache."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def own_temporary() -> Path:
    """Return a folder for temporary files that only this user can read and write. Raises JobError."""
    folder = Path(tempfile.gettempdir()) / f"horizonml-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat() if os.path.lexists(folder) else None
    if found is not None and (not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022):
        raise JobError(
            f"{folder} belongs to somebody else, or others can write there; set HORIZONML_CACHE (or TMPDIR) to a folder"
        )
    return folder


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file beside its place, make it durable, and move it into place. Raises OSError.

    It gets this mode, less what the user's umask takes away.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Yield the path of a draft of a file, in a hidden folder beside its place, and move the draft into place.

    What else is written into that folder comes along, before the file itself, so that a file in several parts is never
    there without the others. After an error, nothing has changed. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as hidden:
        draft = Path(hidden) / path.name
        yield draft
        parts = [part for part in Path(hidden).iterdir() if part != draft]
        handle = os.open(Path(hidden) / ".mode", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        mode = stat.S_IMODE(os.fstat(handle).st_mode)  # which the umask allows
        os.close(handle)
        for part in (*parts, draft):
            with part.open("rb") as file:
                os.fsync(file.fileno())
            os.chmod(part, mode)
        for part in (*parts, draft):
            os.replace(part, path.with_name(part.name))
    sync_folder(path.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError while the file or folder that the user named is written into a JobError that names it."""
    try:
        yield
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror or error}") from None


def sync_folder(folder: Path) -> None:
    """Make the renames in a folder durable. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a temporary folder of this process, and delete it afterwards.

    Folders that processes of this user have left behind, because they were killed, are deleted, too: the lock that a
    process holds on its folder ends with it.
    """
    _sweep()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        lock = _lock(folder)
        if folder.is_dir():  # or another process that sweeps was quicker than the lock
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:  # not every file system has locks
            os.close(lock)


def _sweep() -> None:
    """Delete the temporary folders of this user's processes that have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder of this user; return what `os.close` releases, or None if it is another's, in use, or gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = folder.stat(follow_symlinks=False)
        if found.st_uid == os.getuid() and os.path.samestat(found, os.fstat(lock)):
            return lock
    os.close(lock)
    return None
