"""Manages the folder of a run, which is marked as HorizonML's and used by one run at a time.

Two runs that write into one folder would mix their records and delete each other's checkpoints. `--fresh` moves folders
away, and it must never touch one that does not belong to a run.

Nor may groups that are over write into a folder in which a newer group has begun: a `Fence` keeps them out. A group may
be held up for minutes, between any two instructions, and wake up when the others have long formed a new one. So each
group announces itself in the folder before it writes there, by a file whose name says which generation it is, and looks
for newer announcements before it turns what it wrote into a checkpoint. No group removes a newer one's announcement, so
none that wakes up can take one back.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from errno import ENOLCK, ENOSPC, ENOSYS, EOPNOTSUPP
from itertools import count
from pathlib import Path
from typing import Annotated

from filelock import FileLock, Timeout
from pydantic import Field

from horizonml.errors import CheckpointError, JobError, PeerLost, is_out_of_files
from horizonml.files import sync_folder

_log = logging.getLogger(__name__)
MARK = ".horizonml-run"
_TEXT = "This folder is a run of HorizonML.\n"
_PLACES = ".places"  # a lock for each rank, and who holds it
PROBE = ".probe-"  # begins the names of files by which ranks find out who shares a disk; each deletes its own
_NO_LOCKS = (ENOLCK, ENOSYS, EOPNOTSUPP)  # how file systems report that they have no locks
_MEASURED = ("cluster.yaml", "profile-*.yaml")  # what is known of the devices, which holds for the next run as well
_LOCK_SECONDS = 5.0  # a process that was killed a moment ago may still be exiting


def make_run_folder(path: Path) -> None:
    """Make a run's folder if it does not exist, and mark it as HorizonML's if it is empty. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True)
    if not _content(path):
        (path / MARK).write_text(_TEXT)


def in_use(path: Path, rank: int) -> str | None:
    """Return why a rank cannot take its place in a run's folder, because another process has it, or None."""
    places = path / _PLACES
    if not (places / f"rank-{rank}.lock").exists():
        return None
    try:
        with FileLock(places / f"rank-{rank}.lock", timeout=_LOCK_SECONDS):
            return None
    except Timeout:
        return _taken(path, rank)
    except (NotImplementedError, OSError):  # what hinders locks is reported when the place is taken
        return None


def _taken(path: Path, rank: int) -> str:
    owner = _read(path / _PLACES / f"rank-{rank}.json")
    return (
        f"{path} is in use by rank {rank} of {owner}; wait for its end, or choose another name or folder for this run"
    )


def foreign(path: Path) -> str | None:
    """Return why `--fresh` must not touch a folder, or None if it may."""
    if path.resolve() == Path(path.resolve().anchor):
        return f"--fresh moves or deletes only runs of HorizonML, and {path} is the root of the file system"
    for folder in (path, _previous(path)):
        try:
            holds_files = os.path.lexists(folder) and bool(_content(folder))
        except OSError as error:
            return f"{folder} cannot be looked at: {error.strerror or error}; choose another name or folder"
        if folder.is_symlink() and folder != path:
            return f"--fresh deletes {folder}, and that is a symbolic link; remove the link, or choose another name"
        precious = _precious(folder)
        if precious is not None:
            return f"--fresh moves or deletes only runs of HorizonML, and {folder} {precious}; choose another folder"
        if holds_files and not is_marked(folder):
            return (
                f"--fresh moves or deletes only runs of HorizonML, and {folder} is none (it has no {MARK}); choose "
                "another name or folder, or move it away yourself"
            )
    return None


def is_marked(folder: Path) -> bool:
    """Return whether a folder is marked as a run: by a small regular file of its own, and no link to one."""
    try:
        descriptor = os.open(folder / MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode) and os.read(descriptor, len(_TEXT) + 1) == _TEXT.encode()
    finally:
        os.close(descriptor)


def _precious(folder: Path) -> str | None:
    """Return, as a part of a sentence, why a folder is none that only a run uses, whatever it is marked as."""
    place = folder.resolve()
    with suppress(RuntimeError):  # a user without a home
        if Path.home().resolve().is_relative_to(place):
            return "holds your home folder"
    if place != Path.cwd() and Path.cwd().is_relative_to(place):
        return "holds the working directory"
    if Path(__file__).resolve().is_relative_to(place):
        return "holds HorizonML itself"
    return None


def _content(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != "lost+found"]


def _holds_files(path: Path) -> bool:
    """Return whether a path is a file, or a folder with a file somewhere in it; the marks of groups are none."""
    files = (path,) if path.is_file() else (inner for inner in path.rglob("*") if inner.is_file())
    return any(not file.name.startswith(".") for file in files)


def _never_trained(folder: Path) -> bool:
    """Return whether the records in a run's folder show that it ended before its first step."""
    if any((folder / "checkpoints").glob("step-*")):
        return False
    found = set()
    for file in folder.glob("rank-*.jsonl"):
        with file.open("rb") as lines:
            for line in lines:
                with suppress(ValueError, TypeError, KeyError):
                    found.add(json.loads(line)["kind"])
                if "step" in found:
                    return False
    return "run" in found


def _previous(path: Path) -> Path:
    path = path.resolve() if path.name in ("", "..") else path.absolute()  # "." has no name
    return path.with_name(path.name + ".previous")


class RunFolder:
    """Represents the folder of a run as one of its ranks uses it."""

    def __init__(self, path: Path, rank: int, job: str, required: bool) -> None:
        """Make the folder if it does not exist, and take this rank's place in it.

        `required` says that checkpoints are to be saved there. Raises CheckpointError if they cannot be, or JobError if
        another process holds this rank's place in a run there.
        """
        self.path, self._rank, self._job, self._required = path, rank, job, required
        self._lock, self._marked = self._new_lock(), False
        try:
            self._open()
        except OSError as error:
            # A full disk may recover; a folder that can never be written to is a mistake to report at once.
            if required and error.errno != ENOSPC:
                raise CheckpointError(
                    f"cannot write records and checkpoints to {path.absolute()} as user {os.getuid()}: "
                    f"{error.strerror}; set `folder`, change that one's owner, or train with checkpoint.enabled=false"
                ) from error
            _log.warning("nothing can be written to %s: %s", path, error.strerror)

    def _open(self) -> None:
        make_run_folder(self.path)
        for folder in (self.path, *([self.path / "checkpoints"] if self._required else [])):
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        self._marked = is_marked(self.path)
        self._take_place()

    def _new_lock(self) -> FileLock:
        return FileLock(self.path / _PLACES / f"rank-{self._rank}.lock", timeout=_LOCK_SECONDS)

    def _take_place(self) -> None:
        """Take this rank's place in the folder. Raises JobError if another process has it, and OSError."""
        places = self.path / _PLACES
        places.mkdir(exist_ok=True)
        owner = places / f"rank-{self._rank}.json"
        self._lock = self._new_lock()
        try:
            self._lock.acquire()
        except Timeout:
            raise JobError(_taken(self.path, self._rank)) from None
        except (NotImplementedError, OSError) as error:  # filelock's words for a file system without locks
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            _log.warning("%s is on a file system without locks: see that no other run uses it", self.path)
        owner.write_text(json.dumps({"job": self._job, "process": os.getpid(), "host": socket.gethostname()}))

    def restore(self) -> None:
        """Make the folder again, with its mark and this rank's place, after somebody has deleted it. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self._marked and not is_marked(self.path):  # `--fresh` would not take it for a run
            (self.path / MARK).write_text(_TEXT)
        self._lock.release()  # that of the deleted file, which keeps nobody out
        try:
            self._take_place()
        except JobError as error:
            _log.warning("%s", error)

    def leave(self) -> None:
        """Give this rank's place up before the process ends."""
        self._lock.release()

    @property
    def previous(self) -> Path | None:
        """Return the folder in which the run before this one is kept, or None if there is none."""
        previous = _previous(self.path)
        return previous if previous.is_dir() else None

    def set_aside(self, keep_earlier: bool = False) -> str | None:
        """Move the folder's content to NAME.previous; return why this cannot be done, or None.

        Earlier content under that name is deleted, or with `keep_earlier` moved on to NAME.previous-2 and so on, unless
        there is nothing to move in its place. Neither folder is touched unless it belongs to a run.
        """
        problem = foreign(self.path)
        if problem is not None:
            return problem
        # The ranks of this run have their places and their probes here, and print into their logs.
        kept = (MARK, _PLACES)
        earlier = [
            path
            for path in _content(self.path)
            if path.name not in kept and not path.name.startswith(PROBE) and path.suffix != ".log"
        ]
        if not any(_holds_files(path) for path in earlier):
            return None  # an attempt that never trained must not cost the run before it
        previous = _previous(self.path)
        try:
            if previous.exists() and _never_trained(self.path):  # it must not cost the run before it either
                for path in earlier:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                return None
            if previous.exists() and keep_earlier:
                previous.rename(_free_name(previous))
            elif previous.exists():
                _delete(previous)
            previous.mkdir()
            (previous / MARK).write_text(_TEXT)
            for path in earlier:
                if any(path.match(pattern) for pattern in _MEASURED):
                    shutil.copy2(path, previous / path.name)
                else:
                    path.rename(previous / path.name)
        except OSError as error:
            return f"{self.path} cannot be moved to {previous}: {error.strerror or error}"
        return None


def _free_name(previous: Path) -> Path:
    """Return a path beside an earlier run that does not exist yet: NAME.previous-2, or the next number that is free."""
    numbered = (previous.with_name(f"{previous.name}-{number}") for number in count(2))
    return next(path for path in numbered if not os.path.lexists(path))


def _delete(previous: Path) -> None:
    """Delete an earlier run. Raises OSError if it is none.

    It is first given a name that nobody else knows, and looked at once more: it may just have been replaced.
    """
    hidden = Path(tempfile.mkdtemp(prefix=f".{previous.name}.", dir=previous.parent))
    moved = hidden / previous.name
    previous.rename(moved)
    if moved.is_symlink() or (_content(moved) and not is_marked(moved)):
        moved.rename(previous)
        hidden.rmdir()
        raise OSError(f"{previous} is not a run any more")
    shutil.rmtree(hidden)


def _read(owner: Path) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(owner.read_text())
        return f"job {found['job']} (process {found['process']} on {found['host']})"
    return "another process"


_Number = Annotated[int, Field(ge=0, lt=10**18)]


@dataclass(frozen=True, order=True)
class Term:
    """Orders the groups that have begun in a folder.

    Generations are counted by a rendezvous service, and begin again when the whole job is started again.
    """

    restarts: _Number  # how often the count of generations has begun again in this folder
    generation: _Number

    @classmethod
    def after(cls, known: Iterable[Term | None], generation: int) -> Term:
        """Return the term of a generation that begins where those `known` have begun before."""
        newest = max((term for term in known if term is not None), default=None)
        if newest is None or generation > newest.generation:
            return cls(newest.restarts if newest is not None else 0, generation)
        return cls(newest.restarts + 1, generation)  # all members are here, so it is not one that is over


class Fence:
    """Represents the announcements in one folder, as a member of one group."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.word = ""  # unique to the group, of letters and digits
        self.term = Term(0, 0)  # of this group, which is chosen by what `newest` says on all disks
        self._before = self._announced()

    def newest(self) -> Term | None:
        """Return the newest group that had begun in the folder when this one formed."""
        return max((term for term, _ in self._before), default=None)

    def begin(self) -> None:
        """Announce this group. Raises PeerLost if a newer one has begun since it formed, and this one is over."""
        announced = self._announced()
        # One with a higher number that has begun meanwhile is of the same run, however the restarts were counted.
        since = [one for one in announced if one not in self._before and one[0].generation > self.term.generation]
        newer = max((term for term, _ in since), default=self._newer(announced))
        if newer is not None:
            raise PeerLost(self._refusal(newer))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file(self.term, self.word).touch()
            sync_folder(self._folder)
            for term, word in announced:
                if term < self.term:
                    self._file(term, word).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("cannot write to %s: %s", self._folder, error.strerror or error)

    def check(self) -> None:
        """Raise CheckpointError if a newer group has begun."""
        newer = self._newer(self._announced())
        if newer is not None:
            raise CheckpointError(self._refusal(newer))

    def _newer(self, announced: Iterable[tuple[Term, str]]) -> Term | None:
        """Return the newest of the groups that this one must leave the folder to, if there are any."""
        others = (term for term, word in announced if word != self.word and term >= self.term)
        return max(others, default=None)

    def _announced(self) -> list[tuple[Term, str]]:
        """Return the groups that have begun in the folder, each with its word."""
        try:
            names = os.listdir(self._folder)
        except OSError as error:
            if is_out_of_files(error):  # or a group that is over could write
                raise
            return []
        found = (re.fullmatch(r"\.generation-(\d{1,18})-(\d{1,18})-(\w+)", name) for name in names)
        return [(Term(int(match[1]), int(match[2])), match[3]) for match in found if match]

    def _file(self, term: Term, word: str) -> Path:
        return self._folder / f".generation-{term.restarts}-{term.generation}-{word}"

    def _refusal(self, newer: Term) -> str:
        return (
            f"generation {newer.generation} has begun in {self._folder}, and generation {self.term.generation}, which "
            "is over, may not write there any more"
        )
