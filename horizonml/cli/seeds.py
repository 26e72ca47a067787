"""Trains a job once for each of several seeds, and shows the mean of what the runs reached and how far they differ."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from horizonml.cli.tables import print_table
from horizonml.errors import HorizonError, JobError
from horizonml.job.jobfile import changed
from horizonml.job.schema import Job
from horizonml.report.records import lead_records
from horizonml.report.section import Value, write_numbers
from horizonml.runtime.launch import train_here
from horizonml.telemetry.record import EvaluationRecord


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of an option, such as `0,1,2`. Raises JobError."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise JobError(f"--seeds: {text!r} is not a list of different seeds, for example 0,1,2")
    return seeds


def train_seeds(job: Job, seeds: list[int], fresh: bool, metrics: tuple[str, int] | None) -> bool:
    """Run the job for each seed, in folders of their own inside the job's; return whether all ran to their ends.

    Runs that are complete already are not repeated. Raises RankFailed or HorizonError.
    """
    folders = {seed: job.run_folder / f"seed-{seed}" for seed in seeds}
    for number, (seed, folder) in enumerate(folders.items(), 1):
        print(f"seed {seed} ({number} of {len(seeds)}), in {folder}", flush=True)
        if not train_here(changed(job, {"seed": seed, "folder": str(folder)}), fresh, metrics):
            return False
    rows = spread_rows(folders)
    header = ["", "mean", "deviation", *(f"seed {seed}" for seed in seeds)]
    print()
    print_table(
        "What the last evaluation of each run found",
        header,
        [list(map(_shown, row.values())) for row in rows],
    )
    files = write_numbers(job.run_folder / "seeds", rows, {"seeds": seeds, "metrics": rows})
    print(f"\nThe numbers are in {' and '.join(map(str, files))}.")
    return True


def spread_rows(folders: Mapping[int, Path]) -> list[dict[str, Value]]:
    """Return for each metric what the runs reached, whose folders are given by seed, with its mean and deviation.

    The deviation is the standard deviation of a single run, estimated from the seeds; None if there is only one. Raises
    HorizonError if a run has no evaluation.
    """
    found = {seed: _last_evaluation(folder) for seed, folder in folders.items()}
    rows = []
    for metric in dict.fromkeys(name for metrics in found.values() for name in metrics):
        values = {seed: metrics.get(metric) for seed, metrics in found.items()}
        reached = [value for value in values.values() if value is not None]
        deviation = statistics.stdev(reached) if len(reached) > 1 else None
        by_seed = {f"seed_{seed}": value for seed, value in values.items()}
        rows.append({"metric": metric, "mean": statistics.mean(reached), "deviation": deviation, **by_seed})
    return rows


def _shown(cell: Value) -> str:
    return "-" if cell is None else cell if isinstance(cell, str) else f"{cell:.4f}"


def _last_evaluation(folder: Path) -> dict[str, float]:
    last = next((one for one in reversed(lead_records(folder)) if isinstance(one, EvaluationRecord)), None)
    if last is None:
        raise HorizonError(f"{folder} has no records of an evaluation")
    return {f"held_out_{name}": value for name, value in {"loss": last.loss, **last.metrics}.items()}
