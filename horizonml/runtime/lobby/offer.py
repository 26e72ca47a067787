"""The job of a run and what it needs: what devices are offered, what they accept, and how they get it.

The lineage identifies a training through all its continuations, so that no device mixes two of one name.
"""

from __future__ import annotations

import ipaddress
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import yaml

from horizonml.errors import DataError, JobError
from horizonml.files import cache_folder, hub_cache, write_atomically
from horizonml.job.jobfile import Place, changed, code_fields, parse, places, taken_over
from horizonml.job.schema import Job
from horizonml.machine.code import EXTRAS
from horizonml.machine.network import FETCH_FROM, SPARE_BYTES, split_address
from horizonml.machine.signals import StopRequest
from horizonml.rendezvous.client import ServiceRefuses
from horizonml.rendezvous.device_messages import MOST_JOB, DeviceState, JobOffer
from horizonml.rendezvous.devices import DeviceHeartbeat, Devices
from horizonml.rendezvous.messages import Nothing
from horizonml.rendezvous.shared_files import FileServer, check_space, fetch, listing
from horizonml.rendezvous.wire import Fields, fields_of, read
from horizonml.security.token import Token
from horizonml.state.runfolder import RunFolder, foreign, make_run_folder
from horizonml.text import count, human_bytes

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

    def devices(
        self, take_part: bool = True, wanted: int | None = None, files: FileServer | None = None, torch: str = ""
    ) -> Devices:
        """Return the devices of a run of this job, of which none has come yet."""
        return Devices(
            self.text, self.name, self.job.digest(), self.lineage, self.most, take_part, wanted, files, torch
        )


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


def is_known(folder: Path, lineage: str) -> bool:
    """Return whether a folder holds a part of a training of this lineage."""
    return (folder / _LINEAGE).exists() and is_of(folder, lineage)


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


@dataclass(frozen=True)
class Needed:
    """The files or folder that a job trains on: the job's field, and the path that it names."""

    field: str
    path: Path


def accept(text: str, source: str, runs: Path, allow_code: bool) -> Job:
    """Return a job that came over the network as this device runs it. Raises JobError.

    Its records and checkpoints go to a folder in `runs`, whatever it says, and downloads into this device's own cache.
    Of its other fields, only those and only the forms are taken over that `horizonml.job.jobfile` allows. Unless
    `allow_code`, it must not name code.
    """
    job = parse(text, source)
    code = code_fields(job)
    if code and not allow_code:
        raise JobError(
            f"{source} names code, which would run on this device ({'; '.join(code)}); if you trust whoever offers it, "
            "have that code here and start `horizonml join --allow-code`"
        )
    for entry in code:
        name = entry.rpartition(": ")[2].partition(":")[0].split(".")[0]
        if not _is_there(name):
            raise JobError(
                f"{entry}: there is no module {name} on this device; start in a folder that has {name}.py, or "
                "install it"
            )
    try:
        changes = taken_over(job, allow_code)
    except JobError as error:
        raise JobError(f"{source} is refused: {error}") from None
    _check_packages(job)
    _check_space(runs)
    return changed(job, changes | {"folder": str(runs / job.name)}, source)


def confinement(address: str, allow_code: bool) -> dict[str, str]:
    """Return the environment that keeps a rank from fetching what this device has not agreed to.

    Of private addresses it may use that of the lobby at `address` only. A loopback address is this device, or where
    somebody's tunnel ends, and what else listens there is none of the job's business.
    """
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(*split_address(address), type=socket.SOCK_STREAM)}
    except (OSError, ValueError):
        found = set()
    own = sorted(one for one in found if not ipaddress.ip_address(one.partition("%")[0]).is_loopback)
    # The libraries of Hugging Face ask their server of their own accord, unless they are told not to.
    offline = {} if allow_code else {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return {FETCH_FROM: ",".join(own), **offline}


def named_files(job: Job) -> list[tuple[Place, Path]]:
    """Return the files of this device that a job reads, with links followed."""
    found = []
    for place in places(job):
        if place.field == "model.weights.source" and place.text.startswith("hub:"):
            found.append((place, hub_cache().resolve()))
        elif not place.is_url:
            path = Path(place.text)
            found.append((place, (path.expanduser() if place.field.startswith("model.") else path).resolve()))
    return found


def named_urls(job: Job) -> list[Place]:
    """Return the URLs that a job reads from."""
    return [place for place in places(job) if place.is_url]


def is_offered(path: Path, folders: Sequence[Path]) -> bool:
    """Return whether a path, with links followed, lies in one of the folders that this device offers."""
    return any(path.is_relative_to(folder.resolve()) for folder in folders)


def needed(job: Job) -> Needed | None:
    """Return the files that a job trains on and does not fetch by itself, if there are any."""
    given = job.data.place
    if given is None or "://" in given:
        return None
    return Needed(f"data.{job.data.source.place}", Path(given))


def with_data(job: Job, where: Needed, path: Path) -> Job:
    """Return the job with its data at another place."""
    return changed(job, {where.field: str(path.absolute())})


def _is_there(module: str) -> bool:
    """Return whether there is a module, without importing it."""
    if (Path(f"{module}.py")).is_file() or (Path(module)).is_dir():
        return True
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _check_space(runs: Path) -> None:
    place = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < SPARE_BYTES:
        raise JobError(
            f"{place} has {human_bytes(free)} free, and {human_bytes(SPARE_BYTES)} stay free on a device that joins; "
            "make room, or choose a folder on another disk by --run-folder"
        )


def _check_packages(job: Job) -> None:
    package = job.data.source.package
    if package is not None and find_spec(package) is None:
        raise JobError(
            f"data.name: {job.data.name} needs the package {package}, which is not installed on this device: "
            f"pip install 'horizonml[{EXTRAS[package]}]'"
        )


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
        self.offer: JobOffer | None = None

    def job(self) -> tuple[Job, str]:
        """Return the job as this device runs it, and the lineage of the training. Raises JobError, ServiceError."""
        try:
            offer = self.offer = read(JobOffer, self._heartbeat.ask(fields_of(Nothing(), "job")))
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
