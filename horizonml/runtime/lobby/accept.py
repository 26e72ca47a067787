"""Decides what of a job that came over the network runs on this device, and with which of its files."""

from __future__ import annotations

import ipaddress
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from horizonml.errors import JobError
from horizonml.files import hub_cache
from horizonml.job.foreign import Place, code_fields, places, taken_over
from horizonml.job.jobfile import changed, parse
from horizonml.job.schema import Job
from horizonml.machine.code import EXTRAS
from horizonml.machine.network import FETCH_FROM, SPARE_BYTES, split_address
from horizonml.text import human_bytes


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
    """Raise JobError if the disk for runs is all but full."""
    place = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < SPARE_BYTES:
        raise JobError(
            f"{place} has {human_bytes(free)} free, and {human_bytes(SPARE_BYTES)} stay free on a device that joins; "
            "make room, or choose a folder on another disk by --run-folder"
        )


def _check_packages(job: Job) -> None:
    """Raise JobError if this device lacks a package that the job needs."""
    package = job.data.source.package
    if package is not None and find_spec(package) is None:
        raise JobError(
            f"data.name: {job.data.name} needs the package {package}, which is not installed on this device: "
            f"pip install 'horizonml[{EXTRAS[package]}]'"
        )
