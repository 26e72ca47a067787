"""Makes of a job what all devices of a run train, whoever they are and however many."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from horizonml.errors import JobError
from horizonml.files import write_atomically
from horizonml.job.jobfile import changed
from horizonml.job.schema import Job
from horizonml.lobby.messages import MOST_JOB
from horizonml.text import count

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
