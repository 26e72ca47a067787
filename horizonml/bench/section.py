"""What a study has to say: findings in words, tables and pictures; the report puts sections on a page."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horizonml.bench.results import Run, Summary, traffic
from horizonml.bench.study import Result, Study, is_busy
from horizonml.engine.clock import KINDS
from horizonml.files import write_atomically, writing
from horizonml.text import human_bytes, human_seconds


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
    setting: str  # what was run, where
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
    "gradient divergence": lambda s: "-" if s.divergence is None else f"{s.divergence:.2f}",
    "sent per step": lambda s: human_bytes(s.bytes_per_step),
    "sent per second": lambda s: human_bytes(s.bytes_per_second) + "/s",
    "energy per sample": lambda s: (
        "not measured on this machine" if s.joules_per_sample is None else f"{s.joules_per_sample * 1000:.1f} mJ"
    ),
}
NOTE = (
    "compute, transfer and wait are shares of all ranks' time and add up to it; CPU, bytes and energy are of all ranks "
    "together; gradient divergence is the distance of a member's gradient from the mean before the reduction, relative "
    "to the mean. The parts of a run are its epochs, or fifths of its steps where it has fewer than three; the time of "
    "an epoch is that of its samples at the median speed."
)
_DIFFERENT = 0.2  # repeats that differ by more of their median than this were disturbed


def summary_table(title: str, columns: Mapping[str, Sequence[Result]]) -> Table:
    """The numbers of some runs side by side; of repeats the median by speed is shown."""
    shown = {name: typical(results).summary for name, results in columns.items()}
    rows = [[label, *(show(summary) for summary in shown.values())] for label, show in COLUMNS.items()]
    if any(len(results) > 1 for results in columns.values()):
        ranges = ("{:,.0f} to {:,.0f}".format(*spread(results)) for results in columns.values())
        rows.append(["samples/s, slowest to fastest repeat", *ranges])
    idle = human_bytes(max(summary.idle_rss_bytes for summary in shown.values()))
    note = f"{NOTE} A process that has only imported torch has {idle} of memory."
    return Table(title, ["", *shown], rows, note)


def rank_tables(runs: Mapping[str, Run]) -> list[Table]:
    """What every rank did and held, and what it sent over every link."""
    ranks = [
        [
            name,
            str(rank.run["rank"]),
            str(rank.run.get("stage", 0)),
            *(percent(sum(s[kind] for s in rank.settled) / sum(s["wall"] for s in rank.settled)) for kind in KINDS),
            f"{sum(s['cpu_seconds'] for s in rank.settled) / sum(s['wall'] for s in rank.settled):.2f}",
            human_bytes(statistics.mean(step["rss_bytes"] for step in rank.settled)),
            human_bytes(max(step["rss_bytes"] for step in rank.steps)),
        ]
        for name, run in runs.items()
        for rank in run.ranks
    ]
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


def typical(results: Sequence[Result]) -> Result:
    """The repeat with the median speed."""
    return sorted(results, key=lambda result: result.summary.samples_per_second)[(len(results) - 1) // 2]


def spread(results: Sequence[Result]) -> tuple[float, float]:
    """Samples per second of the slowest and the fastest repeat; without repeats, of the parts of the run."""
    if len(results) == 1:
        return results[0].summary.slowest_part, results[0].summary.fastest_part
    speeds = [result.summary.samples_per_second for result in results]
    return min(speeds), max(speeds)


def percent(share: float | None, digits: int | None = None) -> str:
    """0.125 -> "12%" and 0.0125 -> "1.2%", or with so many `digits` after the point."""
    if share is None:
        return "-"
    if digits is None:
        digits = 0 if share == 0 or abs(share) >= 0.0995 else 1
    return f"{share:.{digits}%}"


def where(study: Study) -> str:
    """The machine and the versions, in a sentence."""
    machine, versions = study.environment["machine"], study.environment["versions"]
    revision = f", revision {versions['revision']}" if "revision" in versions else ""
    return (
        f"{machine['processor']}, {study.environment['cores']:g} usable, "
        f"{human_bytes(study.environment['memory_limit'])} of memory; {machine['system']}; Python "
        f"{versions['python']}, "
        f"torch {versions['torch']}, HorizonML {versions['horizonml']}{revision}; {study.environment['time']}."
    )


def failures(study: Study) -> list[str]:
    """What did not work, as findings."""
    return [f"{result.name} failed: {(result.error or '').splitlines()[0]}" for result in study.failed]


def warnings(study: Study) -> list[str]:
    """Why the times should not be trusted, as findings: a machine with other work, or repeats that disagree."""
    texts, cores = [], float(study.environment["cores"])
    disturbed = {one.name: one.cores_taken for one in study.succeeded if is_busy(one.cores_taken, cores)}
    if disturbed:
        few = len(disturbed) < len(study.succeeded)
        which = f"{', '.join(disturbed)} ran" if few and len(disturbed) <= 6 else "the runs were measured"
        texts.append(
            f"Warning: the machine was busy. Other processes had up to {max(disturbed.values()):.1f} of its {cores:g} "
            f"cores while {which}, so these speeds are too low, most of all those with several threads or ranks."
        )
    repeats: dict[str, list[Result]] = {}
    for one in study.succeeded:
        alike = " ".join(str(value) for key, value in one.factors.items() if key != "repeat")
        repeats.setdefault(alike, []).append(one)
    for alike, results in repeats.items():
        low, high = spread(results)
        middle = statistics.median(result.summary.samples_per_second for result in results)
        if len(results) > 1 and high - low > _DIFFERENT * middle:
            texts.append(
                f"Warning: the repeats of {alike} differ by {percent((high - low) / middle)} in speed ({low:,.0f} to "
                f"{high:,.0f} samples/s). Something disturbed them: repeat them on a quiet machine (--fresh)."
            )
    return texts


def write_data(study: Study) -> list[Path]:
    """`results.csv`, one run per line, and `results.json`, with the environment and every link; returns their paths."""
    rows = [{**result.factors, **dataclasses.asdict(result.summary)} for result in study.succeeded]
    document: dict[str, Any] = {
        "kind": study.kind,
        "settings": study.settings,
        "environment": study.environment,
        "runs": [
            {
                "name": result.name,
                "factors": result.factors,
                "summary": dataclasses.asdict(result.summary),
                "links": [dataclasses.asdict(link) for link in traffic(result.run)],
                "environment": {
                    key: result.run.lead.run.get(key) for key in ("machine", "versions", "cores", "memory", "threads")
                },
            }
            for result in study.succeeded
        ],
        "failed": {result.name: result.error for result in study.failed},
    }
    return write_numbers(study.folder / "results", rows, document)


def write_numbers(path: Path, rows: Sequence[Mapping[str, Any]], document: Mapping[str, Any]) -> list[Path]:
    """`path.csv` with the rows, `path.json` with the document; returns both. Raises JobError."""
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
