"""Runs a study: many runs of a kind, one after the other, which can be interrupted and resumed.

`FOLDER/study.json` is the manifest: what is studied, where, and by which runs. `FOLDER/runs/NAME/` holds a run's
records, and its `done.json` says that the run has come to its end. The tables and warnings that all kinds of studies
share are made here, too.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from horizonml.errors import HorizonError, JobError
from horizonml.files import write_atomically, writing
from horizonml.job.schema import Job
from horizonml.machine.host import MachineInfo, OtherWork, available_cores, machine_info, memory_limit, versions
from horizonml.report.records import RecordedRun, load_run
from horizonml.report.section import NOTE, ReportTable, Value, number_rows, write_numbers
from horizonml.report.summary import Summary, summarise, traffic
from horizonml.runtime.launch import train_here
from horizonml.runtime.local import RankFailed
from horizonml.telemetry.run_info import JobFacts
from horizonml.text import human_bytes, human_seconds, percent


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
    emulated: tuple[float, ...] = ()  # the cores of the devices that the ranks stand for
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


class CaseCompletion(BaseModel):
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


def read_completion(run: Path, digest: str) -> CaseCompletion | None:
    """Return how a run ended, or None if it has not, or was one of another job. Raises ValueError."""
    try:
        completion = CaseCompletion.model_validate_json((run / "done.json").read_bytes())
    except OSError:
        return None
    return completion if completion.digest == digest else None


_BUSY = 0.1  # of the cores


@dataclass(frozen=True)
class Case:
    """One run of a study; its factors are what makes it differ from the others."""

    name: str
    job: Job
    factors: Factors
    work: float  # how long it takes, in any unit
    emulated: tuple[float, ...] = ()  # the cores of the devices that the ranks stand for

    @property
    def digest(self) -> str:
        """Return what differs if the run would: its job, and the devices that are emulated."""
        return "-".join([self.job.digest(), *(f"{cores:g}" for cores in self.emulated)])


@dataclass(frozen=True)
class CaseResult:
    """A case that was run: its records, or why there are none."""

    name: str
    factors: Factors
    folder: Path
    error: str | None = None
    cores_taken: float = 0.0  # by other processes, on average while it ran

    @cached_property
    def run(self) -> RecordedRun:
        """Return what the ranks recorded. Raises HorizonError."""
        return load_run(self.factors.strategy or self.name, self.folder)

    @cached_property
    def summary(self) -> Summary:
        """Return its numbers."""
        return summarise(self.run)


@dataclass(frozen=True)
class Study:
    """What was studied, and what came out."""

    kind: str
    folder: Path
    settings: StudySettings
    environment: Environment
    results: list[CaseResult]

    @property
    def succeeded(self) -> list[CaseResult]:
        """Return the cases that came to their end."""
        return [result for result in self.results if result.error is None]

    @property
    def failed(self) -> list[CaseResult]:
        """Return the cases that did not come to their end."""
        return [result for result in self.results if result.error is not None]


def run_study(
    kind: str, cases: Sequence[Case], settings: StudySettings, folder: Path, fresh: bool, say: Callable[[str], None]
) -> Study | None:
    """Run the cases that are not done yet, and return the study, or None if it was interrupted. Raises HorizonError.

    A case whose ranks fail is noted, and the others go on, unless it is the first.
    """
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), names
    cases = [dataclasses.replace(case, emulated=settings.emulated) for case in cases]
    entries = [CaseEntry(name=case.name, factors=case.factors, digest=case.digest) for case in cases]
    Manifest(kind=kind, settings=settings, environment=Environment.here(), cases=entries).write(folder)
    ended = {case.name: read_completion(folder / "runs" / case.name, case.digest) for case in cases if not fresh}
    done = {name: one for name, one in ended.items() if one is not None and one.error is None}
    if done:
        say(f"{len(done)} of {len(cases)} runs in {folder} are done already (--fresh does them again)")
    left = sum(case.work for case in cases if case.name not in done)
    finished = sum((case.work for case in cases if case.name in done), 0.0)
    spent = sum((completion.seconds for completion in done.values()), 0.0)
    for number, case in enumerate(cases, start=1):
        if case.name in done:
            continue
        remaining = f"; about {human_seconds(spent / finished * left)} left" if finished else ""
        say(f"\n[{number}/{len(cases)}] {case.factors.describe(case.name)}{remaining}")
        completion = _run_case(case, folder / "runs" / case.name, first=not finished, say=say)
        if completion is None:
            return None
        spent, finished, left = spent + completion.seconds, finished + case.work, left - case.work
    return load_study(folder)


def _run_case(case: Case, folder: Path, first: bool, say: Callable[[str], None]) -> CaseCompletion | None:
    """Run a case, and return how it ended, or None if it was interrupted.

    Raises RankFailed if the other cases would fail, too.
    """
    started, others, error = time.monotonic(), OtherWork(), None
    shutil.rmtree(folder, ignore_errors=True)
    try:
        if not train_here(case.job.model_copy(update={"folder": str(folder)}), fresh=False):
            return None
    except RankFailed as failure:
        if failure.exit_code == JobError.exit_code or first:  # the job is wrong, and so are the others
            raise
        error = str(failure)
        say(f"failed: {error}")
    seconds, taken = time.monotonic() - started, others.cores_taken()
    if is_busy(taken, available_cores()):
        say(f"warning: other processes had {taken:.1f} of the {available_cores():g} cores during this run")
    completion = CaseCompletion(digest=case.digest, seconds=seconds, error=error, cores_taken=taken)
    completion.write(folder)
    return completion


def load_study(folder: Path) -> Study:
    """Return a study from its folder, with the cases that are done. Raises HorizonError."""
    try:
        manifest = Manifest.model_validate_json((folder / "study.json").read_bytes())
        results = []
        for case in manifest.cases:
            run = folder / "runs" / case.name
            completion = read_completion(run, case.digest)
            if completion is not None:
                results.append(CaseResult(case.name, case.factors, run, completion.error, completion.cores_taken))
        return Study(manifest.kind, folder, manifest.settings, manifest.environment, results)
    except (OSError, ValueError) as error:
        raise HorizonError(f"{folder / 'study.json'} cannot be read: {error}") from error


def is_busy(cores_taken: float, cores: float) -> bool:
    """Return whether other processes took so much of the machine that times measured on it are doubtful."""
    return cores_taken > _BUSY * cores


_DIFFERENT = 0.2  # repeats that differ by more of their median than this were disturbed
_ENVIRONMENT = {"machine", "versions", "cores", "memory", "threads"}


def summary_table(title: str, columns: Mapping[str, Sequence[CaseResult]]) -> ReportTable:
    """Return the numbers of some runs side by side; among repeats the one with the median speed is shown."""
    shown = {name: typical(results).summary for name, results in columns.items()}
    rows = number_rows(shown)
    if any(len(results) > 1 for results in columns.values()):
        ranges = ("{:,.0f} to {:,.0f}".format(*spread(results)) for results in columns.values())
        rows.append(["samples/s, slowest to fastest repeat", *ranges])
    idle = human_bytes(max(summary.idle_rss_bytes for summary in shown.values()))
    note = f"{NOTE} A process that has only imported torch has {idle} of memory."
    return ReportTable(title, ["", *shown], rows, note)


def typical(results: Sequence[CaseResult]) -> CaseResult:
    """Return the repeat with the median speed."""
    return sorted(results, key=lambda result: result.summary.samples_per_second)[(len(results) - 1) // 2]


def spread(results: Sequence[CaseResult]) -> tuple[float, float]:
    """Return the samples per second of the slowest and the fastest repeat; without repeats, of a run's parts."""
    if len(results) == 1:
        return results[0].summary.slowest_part, results[0].summary.fastest_part
    speeds = [result.summary.samples_per_second for result in results]
    return min(speeds), max(speeds)


def where(study: Study) -> str:
    """Return the machine and the versions, in a sentence."""
    environment = study.environment
    machine, versions = environment.machine, environment.versions
    revision = f", revision {versions['revision']}" if "revision" in versions else ""
    return (
        f"{machine.processor}, {environment.cores:g} usable, {human_bytes(environment.memory_limit)} of memory; "
        f"{machine.system}; Python {versions['python']}, torch {versions['torch']}, "
        f"HorizonML {versions['horizonml']}{revision}; {environment.time}."
    )


def failures(study: Study) -> list[str]:
    """Return what did not work, as findings."""
    return [f"{result.name} failed: {(result.error or '').splitlines()[0]}" for result in study.failed]


def warnings(study: Study) -> list[str]:
    """Return why the times should not be trusted, as findings: a machine with other work, or repeats that disagree."""
    texts, cores = [], study.environment.cores
    disturbed = {one.name: one.cores_taken for one in study.succeeded if is_busy(one.cores_taken, cores)}
    if disturbed:
        few = len(disturbed) < len(study.succeeded)
        which = f"{', '.join(disturbed)} ran" if few and len(disturbed) <= 6 else "the runs were measured"
        texts.append(
            f"Warning: the machine was busy. Other processes had up to {max(disturbed.values()):.1f} of its {cores:g} "
            f"cores while {which}, so these speeds are too low, most of all those with several threads or ranks."
        )
    repeats: dict[str, list[CaseResult]] = {}
    for one in study.succeeded:
        repeats.setdefault(one.factors.label, []).append(one)
    for label, results in repeats.items():
        low, high = spread(results)
        middle = statistics.median(result.summary.samples_per_second for result in results)
        if len(results) > 1 and high - low > _DIFFERENT * middle:
            texts.append(
                f"Warning: the repeats of {label} differ by {percent((high - low) / middle)} in speed ({low:,.0f} to "
                f"{high:,.0f} samples/s). Something disturbed them: repeat them on a quiet machine (--fresh)."
            )
    return texts


def write_data(study: Study) -> list[Path]:
    """Write `results.csv`, one run per line, and `results.json`, with the environment and every link.

    Return the paths of both. Raises JobError.
    """
    rows = [{**result.factors.to_json(), **result.summary.to_json()} for result in study.succeeded]
    document = {
        "kind": study.kind,
        "settings": study.settings.model_dump(mode="json", exclude_unset=True),
        "environment": study.environment.model_dump(mode="json"),
        "runs": [
            {
                "name": result.name,
                "factors": result.factors.to_json(),
                "summary": result.summary.to_json(),
                "links": [dataclasses.asdict(link) for link in traffic(result.run)],
                "environment": {name: result.run.lead.run.to_json()[name] for name in sorted(_ENVIRONMENT)},
            }
            for result in study.succeeded
        ],
        "failed": {result.name: result.error for result in study.failed},
    }
    return write_numbers(study.folder / "results", rows, document)
