"""The parts of a report: findings in words, tables and pictures."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from horizonml.engine.clock import KINDS
from horizonml.files import write_atomically, writing
from horizonml.report.records import RankRecords, Run
from horizonml.report.summary import Summary, traffic
from horizonml.text import human_bytes, human_seconds, percent


@dataclass(frozen=True)
class Table:
    """A table of text."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """A picture and what it shows."""

    path: Path
    caption: str


@dataclass
class Section:
    """A part of the report."""

    title: str
    setting: str  # what was run, and where
    findings: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    brief: Table | None = None  # what fits a terminal


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "ranks": lambda s: str(s.ranks),
    "members per stage": lambda s: s.plan,
    "micro-batches": lambda s: str(s.micro_batches),
    "updates": lambda s: f"{s.updates:,}",
    "held-out accuracy": lambda s: percent(s.accuracy, 2),
    "training accuracy": lambda s: percent(s.train_accuracy, 2),
    "held-out loss": lambda s: "-" if s.loss is None else f"{s.loss:.4f}",
    "epoch": lambda s: human_seconds(s.epoch_seconds),
    "samples/s, median": lambda s: f"{s.samples_per_second:,.0f}",
    "samples/s, slowest to fastest part": lambda s: f"{s.slowest_part:,.0f} to {s.fastest_part:,.0f}",
    "compute": lambda s: percent(s.compute),
    "transfer": lambda s: percent(s.transfer),
    "wait": lambda s: percent(s.wait),
    "idle per rank and epoch": lambda s: human_seconds(s.idle_seconds),
    "CPU cores in use": lambda s: f"{s.cpu_cores:.2f} ({percent(s.cpu_utilisation)})",
    "memory, mean rank": lambda s: human_bytes(s.rss_mean_bytes),
    "memory, peak rank": lambda s: human_bytes(s.rss_peak_bytes),
    "best checkpoint": lambda s: "-" if s.best_step is None else f"step {s.best_step}",
    "gradient norm, median": lambda s: "-" if s.gradient_norm is None else f"{s.gradient_norm:.3g}",
    "gradient divergence": lambda s: "-" if s.divergence is None else f"{s.divergence:.2f}",
    "sent per step": lambda s: human_bytes(s.bytes_per_step),
    "sent per second": lambda s: human_bytes(s.bytes_per_second) + "/s",
    "energy per sample": lambda s: (
        "not measured on this machine" if s.joules_per_sample is None else f"{s.joules_per_sample * 1000:.1f} mJ"
    ),
}
NOTE = (
    "Compute, transfer and wait are shares of all ranks' time and add up to it; CPU, bytes and energy are of all ranks "
    "together; the gradient norm is that before clipping, which is measured only where gradients are clipped; gradient "
    "divergence is the distance of a member's gradient from the mean before the reduction, relative to the mean. The "
    "parts of a run are its epochs, or fifths of its steps where it has fewer than three; the time of an epoch is that "
    "of its samples at the median speed."
)


def rank_tables(runs: Mapping[str, Run]) -> list[Table]:
    """Return tables of what every rank did and held, and of what it sent over every link."""
    ranks = [[name, *_rank_cells(rank)] for name, run in runs.items() for rank in run.ranks]
    header = ["", "rank", "stage", *KINDS, "CPU cores", "memory, mean", "memory, peak"]
    links = [
        [name, str(link.rank), link.to, human_bytes(link.bytes_per_step), human_bytes(link.bytes_per_second) + "/s"]
        for name, run in runs.items()
        for link in traffic(run)
    ]
    tables = [Table("Rank by rank", header, ranks)]
    if links:
        tables.append(Table("Bytes on every link", ["", "rank", "to", "sent per step", "sent per second"], links))
    return tables


def _rank_cells(rank: RankRecords) -> list[str]:
    wall = sum(step.wall for step in rank.settled)
    return [
        str(rank.run.rank),
        str(rank.run.stage),
        *(percent(sum(step.seconds(kind) for step in rank.settled) / wall) for kind in KINDS),
        f"{sum(step.cpu_seconds for step in rank.settled) / wall:.2f}",
        human_bytes(statistics.mean(step.rss_bytes for step in rank.settled)),
        human_bytes(max(step.rss_bytes for step in rank.steps)),
    ]


Value = str | int | float | None


def write_numbers(path: Path, rows: Sequence[Mapping[str, Value]], document: Mapping[str, object]) -> list[Path]:
    """Write `path.csv` with the rows and `path.json` with the document, and return both. Raises JobError."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    table, data = path.with_suffix(".csv"), path.with_suffix(".json")
    with writing(path.parent):
        write_atomically(table, text.getvalue().encode())
        write_atomically(data, (json.dumps(document, indent=2) + "\n").encode())
    return [table, data]
