"""Runs a study: many runs of a kind, one after the other, which can be interrupted and resumed.

`FOLDER/runs/NAME/` holds a run's records; see `manifest` for the files beside them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from horizonml.bench.manifest import (
    CaseEntry,
    Completion,
    Environment,
    Factors,
    Manifest,
    StudySettings,
    read_completion,
)
from horizonml.errors import HorizonError, JobError
from horizonml.job.schema import Job
from horizonml.machine.resources import OtherWork, available_cores
from horizonml.report.records import Run, load_run
from horizonml.report.summary import Summary, summarise
from horizonml.runtime.launch import train_here
from horizonml.runtime.local import RankFailed
from horizonml.text import human_seconds

_BUSY = 0.1  # of the cores


@dataclass(frozen=True)
class Case:
    """One run of a study; its factors are what makes it differ from the others."""

    name: str
    job: Job
    factors: Factors
    work: float  # how long it takes, in any unit


@dataclass(frozen=True)
class Result:
    """A case that was run: its records, or why there are none."""

    name: str
    factors: Factors
    folder: Path
    error: str | None = None
    cores_taken: float = 0.0  # by other processes, on average while it ran

    @cached_property
    def run(self) -> Run:
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
    results: list[Result]

    @property
    def succeeded(self) -> list[Result]:
        """Return the cases that came to their end."""
        return [result for result in self.results if result.error is None]

    @property
    def failed(self) -> list[Result]:
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
    entries = [CaseEntry(name=case.name, factors=case.factors, digest=case.job.digest()) for case in cases]
    Manifest(kind=kind, settings=settings, environment=Environment.here(), cases=entries).write(folder)
    done = {} if fresh else _done(cases, folder)
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


def _done(cases: Sequence[Case], folder: Path) -> dict[str, Completion]:
    """Return the cases that need not be run again."""
    found = {}
    for case in cases:
        completion = read_completion(folder / "runs" / case.name, case.job.digest())
        if completion is not None and completion.error is None:
            found[case.name] = completion
    return found


def _run_case(case: Case, folder: Path, first: bool, say: Callable[[str], None]) -> Completion | None:
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
    completion = Completion(digest=case.job.digest(), seconds=seconds, error=error, cores_taken=taken)
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
                results.append(Result(case.name, case.factors, run, completion.error, completion.cores_taken))
        return Study(manifest.kind, folder, manifest.settings, manifest.environment, results)
    except (OSError, ValueError) as error:
        raise HorizonError(f"{folder / 'study.json'} cannot be read: {error}") from error


def is_busy(cores_taken: float, cores: float) -> bool:
    """Return whether other processes took so much of the machine that times measured on it are doubtful."""
    return cores_taken > _BUSY * cores
