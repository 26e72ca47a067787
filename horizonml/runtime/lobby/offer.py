"""Makes of a job what all devices of a run train, and decides what of a job from elsewhere runs on this device.

The lineage identifies a training through all its continuations, so that no device mixes two of one name.
"""

from __future__ import annotations

import ipaddress
import secrets
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import yaml

from horizonml.errors import JobError
from horizonml.files import hub_cache, write_atomically
from horizonml.job.foreign import Place, code_fields, places, taken_over
from horizonml.job.jobfile import changed, parse
from horizonml.job.schema import Job
from horizonml.machine.code import EXTRAS
from horizonml.machine.network import FETCH_FROM, SPARE_BYTES, split_address
from horizonml.rendezvous.device_messages import (
    MOST_JOB,
)
from horizonml.rendezvous.devices import Devices
from horizonml.rendezvous.shared_files import FileServer
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
    Of its other fields, only those and only the forms are taken over that `horizonml.job.foreign` allows. Unless
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
