"""Decides what of a job that came over the network runs on this device, and with which of its files."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from horizonml.errors import JobError
from horizonml.job.foreign import code_fields, place_fields
from horizonml.job.jobfile import changed, parse
from horizonml.job.schema import Job

_DOWNLOADED = ("cifar10", "svhn", "mnist")  # into data.folder, or a cache
_BY_FILES = {"folder": "folder", "table": "path", "huggingface": "path", "stream": "path", "text": "path"}
_PACKAGES = {"table": ("pyarrow", "table"), "huggingface": ("datasets", "huggingface"), "stream": ("fsspec", "stream")}


@dataclass(frozen=True)
class Needed:
    """The files or folder that a job trains on: the job's field, and the path that it names."""

    field: str
    path: Path


def accept(text: str, source: str, runs: Path, allow_code: bool) -> Job:
    """Return a job that came over the network as this device runs it. Raises JobError.

    Its records and checkpoints go to a folder in `runs`, whatever it says, and downloads into this device's own cache.
    Unless `allow_code`, it must not name code.
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
    changes: dict[str, object] = {"folder": str(runs / job.name), "rendezvous.address": None}
    if job.data.name in _DOWNLOADED:
        changes["data.folder"] = None
    _check_packages(job)
    return changed(job, changes, source)


def check_lead(job: Job) -> None:
    """Raise JobError if a job would make rank 0, on this device, write or send anything where others say."""
    own = {"folder", "data.folder"}
    written = [entry for entry in place_fields(job, written=True) if entry.partition(":")[0] not in own]
    if written:
        raise JobError(
            f"{job.name}: rank 0 would write to a place that came over the network ({'; '.join(written)}); leave that "
            "out of the job, or start `horizonml up` without --no-train"
        )


def needed(job: Job) -> Needed | None:
    """Return the files that a job trains on and does not fetch by itself, if there are any."""
    field = _BY_FILES.get(job.data.name)
    given = getattr(job.data, field) if field is not None else None
    if given is None or "://" in given:
        return None
    return Needed(f"data.{field}", Path(given))


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


def _check_packages(job: Job) -> None:
    """Raise JobError if this device lacks a package that the job needs."""
    package, extra = _PACKAGES.get(job.data.name, ("", ""))
    if package and find_spec(package) is None:
        raise JobError(
            f"data.name: {job.data.name} needs the package {package}, which is not installed on this device: "
            f"pip install 'horizonml[{extra}]'"
        )
