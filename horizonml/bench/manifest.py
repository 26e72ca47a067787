"""What a study keeps on disk beside the records of its runs.

`FOLDER/study.json` is the manifest: what is studied. `FOLDER/runs/NAME/done.json` says that a run has come to its end.
"""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from horizonml.files import write_atomically, writing
from horizonml.job.schema import Job
from horizonml.machine.host import MachineInfo, machine_info, versions
from horizonml.machine.resources import available_cores, memory_limit
from horizonml.report.lines import JobFacts
from horizonml.report.section import Value


class ScalingMode(StrEnum):
    """What grows with the number of workers."""

    WEAK = "weak"  # the batch, so that each worker keeps its part
    STRONG = "strong"  # nothing: the workers share one batch


class Factors(BaseModel):
    """What makes a run of a study differ from the others. None where the study does not vary it."""

    model_config = ConfigDict(frozen=True)

    model: str | None = None
    strategy: str | None = None
    samples: int | None = None
    workers: int | None = None
    batch_size: int | None = None
    repeat: int = 0

    def to_json(self) -> dict[str, Value]:
        """Return plain JSON values, without what the study does not vary."""
        return self.model_dump(exclude_none=True)

    @property
    def label(self) -> str:
        """Return what repeats of one run have in common."""
        return " ".join(str(value) for value in self.model_dump(exclude_none=True, exclude={"repeat"}).values())

    def describe(self, name: str) -> str:
        """Return the factors in words; `name` stands for a strategy that the study does not vary."""
        words = [self.strategy or name]
        if self.model is not None:
            words.append(self.model)
        if self.samples is not None:
            words.append(f"{self.samples:,} samples")
        if self.workers is not None:
            words.append(f"{self.workers} worker{'s' if self.workers > 1 else ''}")
        if self.batch_size is not None:
            words.append(f"{self.batch_size:,} per batch")
        if self.repeat:
            words.append(f"repeat {self.repeat + 1}")
        return ", ".join(words)


class StudySettings(BaseModel):
    """The options of a study. None where it has no such option."""

    model_config = ConfigDict(frozen=True)

    mode: ScalingMode | None = None
    strategy: str | None = None
    workers: int | None = None
    steps: int | None = None
    repeats: int = 1
    job: JobFacts

    @staticmethod
    def facts(job: Job) -> JobFacts:
        """Return what is kept of a job: all of it."""
        return JobFacts.model_validate(job.model_dump())


class Environment(BaseModel):
    """Where a study runs."""

    model_config = ConfigDict(frozen=True)

    machine: MachineInfo
    cores: float  # that the runs may use
    memory_limit: float  # bytes that they may use
    versions: dict[str, str]
    time: str

    @classmethod
    def here(cls) -> Environment:
        """Return the environment of this process."""
        return cls(
            machine=machine_info(),
            cores=available_cores(),
            memory_limit=memory_limit(),
            versions=versions(),
            time=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        )


class CaseEntry(BaseModel):
    """A run that a study consists of."""

    model_config = ConfigDict(frozen=True)

    name: str
    factors: Factors
    digest: str  # of its job


class Manifest(BaseModel):
    """What is studied, where, and by which runs."""

    model_config = ConfigDict(frozen=True)

    kind: str  # a key of `bench.report.SECTIONS`
    settings: StudySettings
    environment: Environment
    cases: list[CaseEntry]

    def write(self, folder: Path) -> None:
        """Write the manifest to a study's folder. Raises JobError."""
        content = self.model_dump_json(indent=2, exclude_unset=True)
        with writing(folder):
            write_atomically(folder / "study.json", f"{content}\n".encode())


class Completion(BaseModel):
    """How a run of a study ended."""

    model_config = ConfigDict(frozen=True)

    digest: str  # of the job that was run
    seconds: float
    error: str | None
    cores_taken: float = 0.0  # by other processes, on average while it ran

    def write(self, run: Path) -> None:
        """Write this beside the run's records. Raises JobError."""
        with writing(run):
            write_atomically(run / "done.json", f"{self.model_dump_json()}\n".encode())


def read_completion(run: Path, digest: str) -> Completion | None:
    """Return how a run ended, or None if it has not, or was one of another job. Raises ValueError."""
    try:
        completion = Completion.model_validate_json((run / "done.json").read_bytes())
    except OSError:
        return None
    return completion if completion.digest == digest else None
