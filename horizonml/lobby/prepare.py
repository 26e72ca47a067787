"""Gets what a device needs before it can train: the job and, by consent, the data."""

from __future__ import annotations

import time

from horizonml.errors import DataError, JobError
from horizonml.files import cache_folder
from horizonml.job.schema import Job
from horizonml.lobby.accept import Needed, accept, is_offered, named_files, named_urls, needed, with_data
from horizonml.lobby.fetching import check_space, fetch, listing
from horizonml.lobby.messages import MOST_JOB, Standing, identifier
from horizonml.lobby.offer import has_records, is_of, note_lineage
from horizonml.lobby.settings import JoinSettings
from horizonml.lobby.voice import Voice
from horizonml.machine.signals import StopRequest
from horizonml.rendezvous.checks import Fields
from horizonml.rendezvous.client import ServiceRefuses
from horizonml.state.runfolder import RunFolder, foreign, make_run_folder
from horizonml.text import count, human_bytes


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
