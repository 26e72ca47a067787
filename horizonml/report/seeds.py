"""Compares runs of one job that differ in their seeds: the mean of what they reached, and how far apart they are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizonml.errors import HorizonError
from horizonml.report.section import Table, Value
from horizonml.telemetry.log import read_lines

_ABOUT = {"kind", "step", "epoch", "time", "seconds", "samples", "within_epoch", "best"}  # the others are metrics


@dataclass(frozen=True)
class Spread:
    """Describes what the runs reached in one metric."""

    metric: str
    values: Mapping[int, float]  # by seed

    @property
    def mean(self) -> float:
        """Return the mean over the seeds."""
        return statistics.mean(self.values.values())

    @property
    def deviation(self) -> float | None:
        """Return the standard deviation of a single run, estimated from the seeds; None if there is only one."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None


def last_evaluation(folder: Path) -> dict[str, float]:
    """Return the metrics of a run's last evaluation on held-out data. Raises HorizonError if there is none."""
    last: dict[str, Any] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in read_lines(path):
            if line.get("kind") == "evaluation" and line["time"] >= last.get("time", -math.inf):
                last = line
    if not last:
        raise HorizonError(f"{folder} has no records of an evaluation")
    return {f"held_out_{name}": float(value) for name, value in last.items() if name not in _ABOUT}


def spreads(folders: Mapping[int, Path]) -> list[Spread]:
    """Return the spread of each metric over runs, whose folders are given by seed. Raises HorizonError."""
    found = {seed: last_evaluation(folder) for seed, folder in folders.items()}
    names = dict.fromkeys(name for metrics in found.values() for name in metrics)
    return [Spread(name, {seed: metrics[name] for seed, metrics in found.items() if name in metrics}) for name in names]


def as_table(found: list[Spread]) -> Table:
    """Return the spreads as a table."""
    seeds = list(dict.fromkeys(seed for spread in found for seed in spread.values))
    header = ["", "mean", "deviation", *(f"seed {seed}" for seed in seeds)]
    rows = []
    for one in found:
        values = [f"{one.values[seed]:.4f}" if seed in one.values else "-" for seed in seeds]
        rows.append([one.metric, f"{one.mean:.4f}", "-" if one.deviation is None else f"{one.deviation:.4f}", *values])
    return Table("What the last evaluation of each run found", header, rows)


def as_rows(found: list[Spread]) -> list[dict[str, Value]]:
    """Return the spreads as rows for files."""
    rows: list[dict[str, Value]] = []
    for one in found:
        by_seed = {f"seed_{seed}": value for seed, value in one.values.items()}
        rows.append({"metric": one.metric, "mean": one.mean, "deviation": one.deviation, **by_seed})
    return rows
