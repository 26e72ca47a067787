"""Copies checkpoints to another place, which is a folder or a URL that fsspec knows, such as s3://bucket/path.

    PLACE/step-00000230/stage-0.safetensors, ... and, once all of them are there, checkpoint.json

The machine of rank 0 keeps all shards, so it copies alone, in a thread, while training goes on. A copy counts only with
its `checkpoint.json`, which is written last.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import fsspec

from horizonml.errors import CheckpointError, JobError
from horizonml.files import scratch_folder
from horizonml.state.saver import superfluous
from horizonml.state.shards import METADATA, Metadata, is_folder_name, read_metadata, verify

_log = logging.getLogger(__name__)
_END_SECONDS = 600.0  # that the end of a run waits for its last copy
_STOP_SECONDS = 20.0  # the same if it was stopped


class CopyStore:
    """Where copies of checkpoints lie."""

    def __init__(self, url: str) -> None:
        """Name the place. Raises JobError if no file system for it is installed."""
        try:
            self._files, root = fsspec.core.url_to_fs(str(Path(url).absolute()) if "://" not in url else url)
        except (ImportError, ValueError) as error:
            raise JobError(f"checkpoint.copy_to: {url} cannot be reached: {error}") from error
        self.url, self._root = url, str(root).rstrip("/")

    def steps(self) -> list[str]:
        """Return the names of the checkpoints of which all is there, the newest first. Raises OSError."""
        self._files.invalidate_cache()
        if not self._files.exists(self._root):
            return []
        names = [str(path).rstrip("/").rpartition("/")[2] for path in self._files.ls(self._root, detail=False)]
        found = [name for name in names if is_folder_name(name) and self._files.exists(self._at(name, METADATA))]
        return sorted(found, key=lambda name: int(name.partition("-")[2]), reverse=True)

    def put(self, path: Path) -> None:
        """Copy a checkpoint, unless it is there.

        Raises OSError, and CheckpointError where copies of later steps are there: they may be of another training, and
        `prune` would keep them instead of this one's.
        """
        metadata, there = read_metadata(path), self.steps()
        if path.name in there and self._files.cat_file(self._at(path.name, METADATA)) == (path / METADATA).read_bytes():
            return
        if any(int(name.partition("-")[2]) >= metadata.step for name in there):
            raise CheckpointError(
                f"{there[0]} is there, of another training or from before this one went back; nothing is copied until "
                "this one is further: name another place (checkpoint.copy_to), or move those copies away"
            )
        self._files.makedirs(self._at(path.name), exist_ok=True)
        here = [
            name for name in (*metadata.shards, *metadata.inner) if name in metadata.shards or (path / name).exists()
        ]
        for name in [*here, METADATA]:
            self._files.put_file(str(path / name), self._at(path.name, name))

    def get(self, name: str, folder: Path) -> tuple[Path, Metadata]:
        """Fetch a checkpoint into a folder, verify it, and return it. Raises OSError, CheckpointError."""
        target = folder / name
        target.mkdir(parents=True)
        self._files.get_file(self._at(name, METADATA), str(target / METADATA))
        metadata = read_metadata(target)
        for shard in metadata.shards:
            self._files.get_file(self._at(name, shard), str(target / shard))
        for shard in metadata.inner:
            if self._files.exists(self._at(name, shard)):
                self._files.get_file(self._at(name, shard), str(target / shard))
        verify(target, metadata)
        return target, metadata

    def prune(self, keep: int, keeps_best: bool) -> list[str]:
        """Delete all copies but the newest ones and the best, and return their names. Raises OSError."""
        with scratch_folder() as scratch:  # what decides is in their metadata
            for name in self.steps():
                (scratch / name).mkdir()
                self._files.get_file(self._at(name, METADATA), str(scratch / name / METADATA))
            old = [path.name for path in superfluous(scratch, 10**18, keep, keeps_best)]
        for name in old:
            self._files.rm(self._at(name), recursive=True)
        return old

    def _at(self, *names: str) -> str:
        return "/".join([self._root, *names])


class Backup:
    """Copies the newest checkpoint of a run to a place whenever the one before has been copied."""

    def __init__(self, url: str, copies: int, keeps_best: bool) -> None:
        """Keep so many `copies` there, and the best one. Raises JobError."""
        self._place, self._copies, self._keeps_best = CopyStore(url), copies, keeps_best
        self._changed = threading.Condition()
        self._next: Path | None = None
        self._busy = self._ended = False
        self._said = ""
        threading.Thread(target=self._work, name="copies", daemon=True).start()

    def add(self, path: Path) -> None:
        """Copy this checkpoint next."""
        with self._changed:
            self._next = path
            self._changed.notify_all()

    def close(self, stopped: bool) -> None:
        """Wait for the copy of the last checkpoint; not for long if the run was `stopped`."""
        seconds = _STOP_SECONDS if stopped else _END_SECONDS
        with self._changed:
            done = self._changed.wait_for(lambda: self._next is None and not self._busy, seconds)
            self._ended = True
            self._changed.notify_all()
        if not done:
            _log.warning("the newest checkpoint was not copied to %s within %.0f s", self._place.url, seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._next is not None or self._ended)
                if self._next is None:
                    return
                path, self._next, self._busy = self._next, None, True
            self._copy(path)

    def _copy(self, path: Path) -> None:
        begin = time.monotonic()
        try:
            self._place.put(path)
            self._place.prune(self._copies, self._keeps_best)
        except Exception as error:  # noqa: BLE001  (file systems raise errors of their own; a copy is no reason to end)
            if path.is_dir() and str(error) != self._said:  # or a newer checkpoint has taken its place meanwhile
                self._said = str(error)
                _log.warning("%s is not copied to %s: %s", path.name, self._place.url, error or type(error).__name__)
        else:
            self._said = ""
            _log.info("%s is copied to %s (%.1f s)", path.name, self._place.url, time.monotonic() - begin)


def restore(url: str, folder: Path) -> tuple[Path, Metadata]:
    """Fetch the newest intact copy into a run's folder of checkpoints, and return it. Raises CheckpointError.

    Damaged copies are skipped, and a message names them.
    """
    place, problems = CopyStore(url), list[str]()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name in place.steps():
            there = folder / name
            if there.exists() and _is_intact(there):
                raise CheckpointError(f"{there} is there already, and intact; it is as new as the newest copy in {url}")
            with TemporaryDirectory(
                prefix=".step-", dir=folder
            ) as scratch:  # what is left of it goes with the next run
                try:
                    path, metadata = place.get(name, Path(scratch))
                except (CheckpointError, FileNotFoundError) as error:
                    problems.append(str(error))
                    continue
                if there.exists():
                    shutil.rmtree(there)
                path.rename(there)
            for problem in problems:
                _log.warning("%s; an older copy is taken instead: %s", problem, name)
            return there, metadata
    except OSError as error:
        raise CheckpointError(f"{url} cannot be read: {error}") from error
    raise CheckpointError("; ".join(problems) or f"there is no copy of a checkpoint in {url}")


def _is_intact(path: Path) -> bool:
    try:
        verify(path, read_metadata(path))
    except CheckpointError:
        return False
    return True
