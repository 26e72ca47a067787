"""Gets what a device needs before it can train: the job and, by consent, the data.

It also fetches the files of a data set from the device that shares them: all of them and intact, or none.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from horizonml.errors import DataError, JobError
from horizonml.files import cache_folder
from horizonml.job.schema import Job
from horizonml.machine.signals import StopRequest
from horizonml.rendezvous.checks import Fields, whole
from horizonml.rendezvous.client import ServiceRefuses
from horizonml.runtime.lobby.accept import Needed, accept, is_offered, named_files, named_urls, needed, with_data
from horizonml.runtime.lobby.messages import MOST_CHUNK, MOST_JOB, JoinSettings, Standing, Voice, identifier
from horizonml.runtime.lobby.sharing import MOST_FILES, Item, check_name, has_records, is_of, note_lineage
from horizonml.state.runfolder import RunFolder, foreign, make_run_folder
from horizonml.text import count, human_bytes

Ask = Callable[[Fields], Fields]
_SPARE_BYTES = 256 << 20  # that stay free on the disk, for records and checkpoints
_MOST_BYTES = 1 << 50
_PATIENCE_SECONDS = 60.0  # for a device that hashes its files, and gets no further
_HASH = re.compile(r"[0-9a-f]{64}")


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
    most, until = -1, time.monotonic() + patience
    try:
        while (page := ask({"do": "data", "list": 0})).get("ready") is not True:
            done, size = whole(page, "done", 0, _MOST_BYTES), whole(page, "bytes", 0, _MOST_BYTES)
            if done > most:
                most, until = done, time.monotonic() + patience
            elif time.monotonic() > until:
                raise DataError(
                    f"the list of the files that are shared is not ready: for {patience:.0f} s the other device has "
                    f"not hashed more than {human_bytes(done)} of {human_bytes(size)}; see whether its disk answers"
                )
            wait(done, size)
        announced, size = whole(page, "count", 1, MOST_FILES), whole(page, "bytes", 0, _MOST_BYTES)
        items: list[Item] = []
        while len(items) < announced:
            files = page.get("files")
            if not isinstance(files, list) or not files or len(files) > announced - len(items):
                raise ValueError("its list of files does not have as many as it says")
            items.extend(map(_item, files))
            page = ask({"do": "data", "list": len(items)}) if len(items) < announced else page
        found = Listing(items, page.get("single") is True and announced == 1)
        if found.bytes != size:
            raise ValueError(f"its files have {found.bytes:,} bytes, and it said {size:,}")
        names = [item.name.casefold() for item in items]
        if len(set(names)) < len(names):
            raise ValueError("two of its files have one name")
        return found
    except ValueError as error:
        raise DataError(f"the data that is shared is refused: {error}") from None


def check_space(found: Listing, folder: Path) -> None:
    """Raise DataError unless the disk has room for the files."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if found.bytes + _SPARE_BYTES > free:
        raise DataError(
            f"the data takes {human_bytes(found.bytes)}, and {place} has {human_bytes(free)} free, of which "
            f"{human_bytes(_SPARE_BYTES)} stay free; make room, or let $HORIZONML_CACHE name a folder on another disk"
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
                _fetch_one(ask, number, item, path, _added_to(done, there))
            there += item.size
            done(there)
        os.replace(partial, target)
    except OSError as error:
        raise DataError(f"the data cannot be written to {partial}: {error.strerror or error}") from error
    return _root(target, found)


def _added_to(done: Callable[[int], None], before: int) -> Callable[[int], None]:
    """Return what is called with the bytes of one file that are there, after those of the files before it."""
    return lambda size: done(before + size)


def _root(target: Path, found: Listing) -> Path:
    """Return the folder with the files, or the file if it is only one."""
    return target / found.items[0].name if found.single else target


def _fetch_one(ask: Ask, number: int, item: Item, path: Path, done: Callable[[int], None]) -> None:
    """Fetch one file, which appears under its name once it is complete. Raises DataError, OSError."""
    digest, draft = hashlib.sha256(), path.with_name(f"{path.name}.part")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
        size = 0
        while size < item.size:
            piece = ask({"do": "data", "file": number, "from": size}).get("piece")
            if not isinstance(piece, str) or len(piece) > 2 * MOST_CHUNK:
                raise DataError(f"the data that is shared is refused: a piece of {item.name} is not text")
            try:
                content = base64.b64decode(piece, validate=True)
            except binascii.Error:
                content = b""
            if not content or size + len(content) > item.size:
                raise DataError(f"the data that is shared is refused: {item.name} does not have {item.size:,} bytes")
            file.write(content)
            digest.update(content)
            size += len(content)
            done(size)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != item.sha256:
        draft.unlink()
        raise DataError(f"the data that is shared is refused: {item.name} is not what its SHA-256 says; try again")
    os.replace(draft, path)


def _intact(path: Path, item: Item) -> bool:
    """Return whether a file was fetched before."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size != item.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == item.sha256


def _item(value: object) -> Item:
    """Return an entry of a list. Raises ValueError."""
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError("an entry of its list is not that of a file")
    name, size, digest = value
    check_name(name)
    if type(size) is not int or not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"{name!a} has no size")
    if not isinstance(digest, str) or _HASH.fullmatch(digest) is None:
        raise ValueError(f"{name!a} has no SHA-256")
    return Item(name, size, digest)


class CalledAway(Exception):
    """Ends a preparation because this device is needed for something else, or, without a reason, was asked to stop."""


class Preparation:
    """Asks a lobby for the job and the data. `where` is what the lobby is called, for people."""

    def __init__(self, settings: JoinSettings, stop: StopRequest, voice: Voice, where: str) -> None:
        self._settings, self._stop, self._voice, self._where = settings, stop, voice, where
        self._shared = False  # whether the lobby shares the data

    def job(self) -> tuple[Job, str]:
        """Return the job as this device runs it, and the lineage of the training. Raises JobError, ServiceError."""
        reply = self._voice.ask({"do": "job"})
        text, name = reply.get("job"), reply.get("name")
        if not isinstance(text, str) or len(text) > MOST_JOB or not isinstance(name, str):
            raise JobError(f"{self._where} sends no job")
        try:
            lineage = identifier(reply, "lineage")
        except ValueError as error:
            raise JobError(f"{self._where} sends no job: {error}") from None
        self._shared = reply.get("shared") is True
        return accept(text, f"the job of {self._where}", self._settings.runs, self._settings.allow_code), lineage

    def with_data(self, job: Job) -> Job:
        """Return the job with its data where this device has it, or fetches it. Raises HorizonError, CalledAway."""
        where = needed(job)
        missing = self._agree(job, where)
        if where is None:
            return job
        if not missing:
            path = where.path.resolve()
            if path.exists():
                print(f"the data is here: {path}", flush=True)
                return with_data(job, where, path)
            missing = "is not on this device; copy the data to the same path here"
        if not self._shared:
            raise JobError(
                f"{where.field}: {where.path} {missing}, or start `horizonml up` with --share-data on {self._where}"
            )
        found = listing(self._ask, lambda done, size: self._wait(f"waits for the list of files ({_part(done, size)})"))
        folder = cache_folder() / "shared"
        check_space(found, folder)
        files = f"{count(len(found.items), 'file')} ({human_bytes(found.bytes)})"
        if not self._settings.accept_data and not self._settings.ask(
            f"{self._where} shares the data, {files}, which would be kept in {folder}. Fetch it?"
        ):
            self._go_on()  # or nobody has answered
            raise JobError(
                f"{where.field}: {where.path} {missing}, or start `horizonml join --accept-data`, which fetches "
                f"{files} from {self._where}"
            )
        print(f"fetching {files} from {self._where} ...", flush=True)

        def show(done: int) -> None:
            self._voice.say(Standing.PREPARING, f"fetches the data ({_part(done, found.bytes)})")
            self._go_on()

        path = fetch(self._ask, found, folder, show)
        print(f"the data is in {path}", flush=True)
        return with_data(job, where, path)

    def _agree(self, job: Job, where: Needed | None) -> str:
        """Ask the owner of this device whether the job may read what it names. Raises JobError, CalledAway.

        Returns why the data must not be read where the job says, or nothing if it may. What is not offered is not even
        looked at, so that a job cannot find out what this device has.
        """
        for url in named_urls(job):
            print(f"the job reads from a server: {url.field}: {url.text}", flush=True)
            if not self._settings.accept_data and not self._settings.ask(f"Fetch {url.text}?"):
                self._go_on()
                raise JobError(
                    f"{url.field}: {url.text} would be fetched by this device; start `horizonml join --accept-data` to "
                    "agree to that"
                )
        missing = ""
        for place, path in named_files(job):
            if is_offered(path, self._settings.data):
                continue
            is_data = where is not None and place.field == where.field
            words = "is not in a folder that this device offers; start `horizonml join --data FOLDER` with its folder"
            if is_data and self._shared:
                missing = words
            elif not self._settings.ask(f"The job reads {place.field}, which is {path} on this device. Let it?"):
                self._go_on()
                if not is_data:
                    raise JobError(f"{place.field}: {place.text} {words}")
                missing = words
        return missing

    def _ask(self, request: Fields) -> Fields:
        """Ask for a part of the data. Raises DataError, ServiceError."""
        try:
            return self._voice.ask(request)
        except ServiceRefuses as error:
            raise DataError(f"{self._where} does not share the data: {error}") from None

    def _wait(self, words: str) -> None:
        """Wait a moment, and say for what. Raises CalledAway."""
        self._voice.say(Standing.PREPARING, words)
        self._go_on()
        time.sleep(0.2)

    def _go_on(self) -> None:
        """Raise CalledAway if this device is to leave."""
        if self._stop.wanted:
            raise CalledAway("")
        if reason := self._settings.busy():
            raise CalledAway(reason)


def take_folder(job: Job, lineage: str) -> None:
    """Move away what another training has left in a run's folder, and delete nothing. Raises HorizonError."""
    folder = job.run_folder
    try:
        if not is_of(folder, lineage):
            if (problem := foreign(folder)) is not None:
                raise JobError(f"{problem.replace('--fresh', 'joining')} (--run-folder)")
            moved = has_records(folder)
            place = RunFolder(folder, 0, job.name, False)
            problem = place.set_aside(keep_earlier=True)
            place.leave()
            if problem is not None:
                raise JobError(problem)
            if moved:
                print(f"{folder} held another training of this name, which is kept in {folder}.previous", flush=True)
        make_run_folder(folder)
        note_lineage(folder, lineage)
    except OSError as error:
        raise JobError(f"cannot write to {folder.absolute()}: {error.strerror or error}; see --run-folder") from error


def _part(done: int, size: int) -> str:
    return f"{100 * done / size:.0f}%" if size else "100%"
