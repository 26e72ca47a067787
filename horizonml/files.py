"""Writes files so that a crash leaves the old content or the new, and never half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from horizonml.errors import JobError


def cache_folder() -> Path:
    """Return the folder for downloads and profiles: $HORIZONML_CACHE, or else one in the user's cache directory."""
    if os.environ.get("HORIZONML_CACHE"):
        return Path(os.environ["HORIZONML_CACHE"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "horizonml"
    try:
        return Path.home() / ".cache" / "horizonml"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / f"horizonml-{os.getuid()}"


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file beside its place, make it durable, and move it into place, with this mode. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
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
        for part in (*parts, draft):
            with part.open("rb") as file:
                os.fsync(file.fileno())
            os.chmod(part, 0o644)
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
