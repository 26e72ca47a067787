"""Gets what a device needs before it can train: the job and, by consent, the data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from horizonml.errors import DataError, JobError
from horizonml.files import cache_folder
from horizonml.job.schema import Job
from horizonml.machine.signals import StopRequest
from horizonml.rendezvous.client import ServiceRefuses
from horizonml.rendezvous.device_messages import (
    DeviceState,
    JobOffer,
)
from horizonml.rendezvous.devices import DeviceHeartbeat
from horizonml.rendezvous.messages import (
    Nothing,
)
from horizonml.rendezvous.shared_files import check_space, fetch, listing
from horizonml.rendezvous.wire import Fields, fields_of, read
from horizonml.runtime.lobby.offer import (
    Needed,
    accept,
    has_records,
    is_of,
    is_offered,
    named_files,
    named_urls,
    needed,
    note_lineage,
    with_data,
)
from horizonml.security.token import Token
from horizonml.state.runfolder import RunFolder, foreign, make_run_folder
from horizonml.text import count, human_bytes


@dataclass(frozen=True)
class JoinSettings:
    """What `horizonml join` was asked for."""

    token: Token | None
    runs: Path = Path("runs")  # where this device keeps what runs leave
    data: tuple[Path, ...] = ()  # folders whose files jobs may read
    accept_data: bool = False
    allow_code: bool = False
    name: str | None = None
    ask: Callable[[str], bool] = lambda question: False  # the person at the terminal, if there is one
    busy: Callable[[], str | None] = lambda: None  # why this device must not train now; None if it may


class CalledAway(Exception):
    """Ends a preparation because this device is needed for something else, or, without a reason, was asked to stop."""


class JoinPreparation:
    """Asks the device that offers a run for the job and the data. `where` is what it is called, for people."""

    def __init__(self, settings: JoinSettings, stop: StopRequest, heartbeat: DeviceHeartbeat, where: str) -> None:
        self._settings, self._stop, self._heartbeat, self._where = settings, stop, heartbeat, where
        self._shared = False  # whether the data can be fetched

    def job(self) -> tuple[Job, str]:
        """Return the job as this device runs it, and the lineage of the training. Raises JobError, ServiceError."""
        try:
            offer = read(JobOffer, self._heartbeat.ask(fields_of(Nothing(), "job")))
        except ValueError as error:
            raise JobError(f"{self._where} sends no job: {error}") from None
        self._shared = offer.shared
        source = f"the job of {self._where}"
        return accept(offer.job, source, self._settings.runs, self._settings.allow_code), offer.lineage

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
            self._heartbeat.say(DeviceState.PREPARING, f"fetches the data ({_part(done, found.bytes)})")
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
        try:
            return self._heartbeat.ask(request)
        except ServiceRefuses as error:
            raise DataError(f"{self._where} does not share the data: {error}") from None

    def _wait(self, words: str) -> None:
        self._heartbeat.say(DeviceState.PREPARING, words)
        self._go_on()
        time.sleep(0.2)

    def _go_on(self) -> None:
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
