"""A study: many runs of a kind, one after the other, that can be interrupted and resumed.

`FOLDER/study.json` says what is studied, `FOLDER/runs/NAME/` holds a run's records, and `done.json` beside them that it
came to its end.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from horizonml.bench.results import Run, Summary, load_run, summarise
from horizonml.errors import HorizonError
from horizonml.files import write_atomically, writing
from horizonml.job.schema import Job
from horizonml.machine.host import machine_info, versions
from horizonml.machine.resources import OtherWork, available_cores, memory_limit
from horizonml.runtime.launch import train_here
from horizonml.runtime.local import RankFailed
from horizonml.text import human_seconds

_BUSY = 0.1  # of the cores


@dataclass(frozen=True)
class Case:
    """One run of a study; `factors` is what makes it differ from the others."""

    name: str
    job: Job
    factors: dict[str, Any]
    work: float  # how long it takes, in any unit


@dataclass(frozen=True)
class Result:
    """A case that was run: its records, or why there are none."""

    name: str
    factors: dict[str, Any]
    folder: Path
    error: str | None = None
    cores_taken: float = 0.0  # by other processes, on average while it ran

    @cached_property
    def run(self) -> Run:
        """What the ranks recorded."""
        return load_run(str(self.factors.get("strategy", self.name)), self.folder)

    @cached_property
    def summary(self) -> Summary:
        """Its numbers."""
        return summarise(self.run)


@dataclass(frozen=True)
class Study:
    """What was studied, and what came out."""

    kind: str
    folder: Path
    settings: dict[str, Any]
    environment: dict[str, Any]
    results: list[Result]

    @property
    def succeeded(self) -> list[Result]:
        """The cases that came to their end."""
        return [result for result in self.results if result.error is None]

    @property
    def failed(self) -> list[Result]:
        """The others."""
        return [result for result in self.results if result.error is not None]


def run_study(
    kind: str, cases: Sequence[Case], settings: dict[str, Any], folder: Path, fresh: bool, say: Callable[[str], None]
) -> Study | None:
    """Run the cases that are not done yet; None if interrupted. Raises HorizonError.

    A case whose ranks fail is noted, and the others go on, unless it is the first.
    """
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), names
    manifest = {
        "kind": kind,
        "settings": settings,
        "environment": environment(),
        "cases": [{"name": case.name, "factors": case.factors, "digest": case.job.digest()} for case in cases],
    }
    with writing(folder):
        write_atomically(folder / "study.json", (json.dumps(manifest, indent=2) + "\n").encode())
    done: dict[str, dict[str, Any]] = {}
    for case in () if fresh else cases:
        outcome = _outcome(folder / "runs" / case.name, case.job.digest())
        if outcome is not None and outcome["error"] is None:
            done[case.name] = outcome
    if done:
        say(f"{len(done)} of {len(cases)} runs in {folder} are done already (--fresh does them again)")
    left = sum(case.work for case in cases if case.name not in done)
    finished = sum((case.work for case in cases if case.name in done), 0.0)
    spent = sum((outcome["seconds"] for outcome in done.values()), 0.0)
    for number, case in enumerate(cases, start=1):
        if case.name in done:
            continue
        remaining = f"; about {human_seconds(spent / finished * left)} left" if finished else ""
        say(f"\n[{number}/{len(cases)}] {_words(case)}{remaining}")
        started, others, error = time.monotonic(), OtherWork(), None
        shutil.rmtree(folder / "runs" / case.name, ignore_errors=True)
        try:
            if not train_here(case.job.model_copy(update={"folder": str(folder / "runs" / case.name)}), fresh=False):
                return None
        except RankFailed as failure:
            if failure.exit_code == 2 or not finished:  # the job is wrong, and so are the others
                raise
            error = str(failure)
            say(f"failed: {error}")
        seconds = time.monotonic() - started
        spent, finished, left = spent + seconds, finished + case.work, left - case.work
        taken = others.cores_taken()
        if is_busy(taken, available_cores()):
            say(f"warning: other processes had {taken:.1f} of the {available_cores():g} cores during this run")
        outcome = {"digest": case.job.digest(), "seconds": seconds, "error": error, "cores_taken": taken}
        with writing(folder):
            write_atomically(folder / "runs" / case.name / "done.json", (json.dumps(outcome) + "\n").encode())
    return load_study(folder)


def load_study(folder: Path) -> Study:
    """A study from its folder, with the cases that are done. Raises HorizonError."""
    try:
        manifest = json.loads((folder / "study.json").read_text())
        results = []
        for case in manifest["cases"]:
            run = folder / "runs" / case["name"]
            outcome = _outcome(run, case["digest"])
            if outcome is not None:
                taken = outcome.get("cores_taken", 0.0)
                results.append(Result(case["name"], case["factors"], run, outcome["error"], taken))
        return Study(manifest["kind"], folder, manifest["settings"], manifest["environment"], results)
    except (OSError, ValueError, KeyError) as error:
        raise HorizonError(f"{folder / 'study.json'} cannot be read: {error}") from error


def is_busy(cores_taken: float, cores: float) -> bool:
    """Whether other processes took so much of the machine that times measured on it are doubtful."""
    return cores_taken > _BUSY * cores


def environment() -> dict[str, Any]:
    """Where a study runs."""
    return {
        "machine": machine_info().to_json(),
        "cores": available_cores(),
        "memory_limit": memory_limit(),
        "versions": versions(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _outcome(run: Path, digest: str) -> dict[str, Any] | None:
    """How a run ended, if it has, and was one of this job."""
    try:
        outcome: dict[str, Any] = json.loads((run / "done.json").read_text())
    except OSError:
        return None
    return outcome if outcome["digest"] == digest else None


def _words(case: Case) -> str:
    factors = dict(case.factors)
    words = [str(factors.pop("strategy", case.name))]
    units = {"samples": "samples", "workers": "workers", "batch_size": "per batch", "repeat": "repeat"}
    for key, value in factors.items():
        if key == "repeat":
            if value:
                words.append(f"repeat {value + 1}")
        elif key == "workers":
            words.append(f"{value} worker{'s' if value > 1 else ''}")
        elif key in units:
            words.append(f"{value:,} {units[key]}")
        else:
            words.append(str(value))
    return ", ".join(words)
