"""The parts of a report: findings in words, tables and pictures; and the files that show them: HTML, CSV and JSON."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from horizonml import __version__
from horizonml.engine.clock import KINDS
from horizonml.files import write_atomically, writing
from horizonml.report.records import Change, RankRecords, RecordedRun, describe
from horizonml.report.summary import MEDIANS, Summary, traffic
from horizonml.telemetry.record import StateSource
from horizonml.text import human_bytes, human_seconds, percent, printable


@dataclass(frozen=True)
class ReportTable:
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
    tables: list[ReportTable] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    brief: ReportTable | None = None  # what fits a terminal


def _median(name: str, summary: Summary) -> str:
    value = summary.medians[name]
    return "-" if value is None else f"{value:.3g}"


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
    "speed-up over the fastest device": lambda s: "-" if s.speed_up is None else f"{s.speed_up:.2f}",
    "efficiency": lambda s: percent(s.efficiency),
    "compute": lambda s: percent(s.compute),
    "transfer": lambda s: percent(s.transfer),
    "wait": lambda s: percent(s.wait),
    "idle per rank and epoch": lambda s: human_seconds(s.idle_seconds),
    "CPU cores in use": lambda s: f"{s.cpu_cores:.2f} ({percent(s.cpu_utilisation)})",
    "memory, mean rank": lambda s: human_bytes(s.rss_mean_bytes),
    "memory, peak rank": lambda s: human_bytes(s.rss_peak_bytes),
    "best checkpoint": lambda s: "-" if s.best_step is None else f"step {s.best_step}",
    **{label: partial(_median, name) for name, label in MEDIANS.items()},
    "gradient divergence": lambda s: "-" if s.divergence is None else f"{s.divergence:.2f}",
    "sent per step": lambda s: human_bytes(s.bytes_per_step),
    "sent per second": lambda s: human_bytes(s.bytes_per_second) + "/s",
    "energy per sample": lambda s: (
        "not measured on all machines" if s.joules_per_sample is None else f"{s.joules_per_sample * 1000:.1f} mJ"
    ),
}
_CHANGES: dict[str, Callable[[Summary], str]] = {  # for runs whose group has changed
    "ranks lost": lambda s: f"{s.losses:,}",
    "ranks joined": lambda s: f"{s.joins:,}",
    "goodput": lambda s: percent(s.goodput, 1),
    "time without steps": lambda s: human_seconds(s.stopped_seconds) if s.stopped_seconds else "none",
    "steps repeated": lambda s: f"{s.steps_repeated:,}",
}
NOTE = (
    "Efficiency is the speed of all devices together, divided by the sum of what each of them does alone, as measured "
    "at the end of the run. Compute, transfer and wait are shares of all ranks' time and add up to it; CPU, bytes and "
    "energy are of all ranks together; the gradient norm is that before clipping, which is measured only where "
    "gradients are clipped; gradient divergence is the distance of a member's gradient from the mean before the "
    "reduction, relative to the mean. The parts of a run are its epochs, or fifths of its steps where it has fewer "
    "than three; the time of an epoch is that of its samples at the median speed."
)

SOURCES = {
    StateSource.MEMORY: "memory of the others",
    StateSource.REPLICA: "replica",
    StateSource.DISK: "checkpoint",
    StateSource.START: "nowhere: begun again",
}
_CHANGES_NOTE = (
    "Ranks are called by the numbers that they were started with. A loss is noticed after the time for which the rank "
    "had been silent, or at once if its connections were closed, as they are when a process is killed. The time until "
    "the others step again counts from then to the end of their next step. No steps: from the end of the last step to "
    "the beginning of the next one. Goodput is the share of the wall time that these gaps and repeated steps have not "
    "taken."
)


_PERPLEXITY: dict[str, Callable[[Summary], str]] = {
    "held-out perplexity": lambda s: "-" if s.perplexity is None else f"{s.perplexity:.2f}",
    "unigram baseline": lambda s: "-" if s.unigram is None else f"{s.unigram:.2f}",
}


def number_rows(summaries: Mapping[str, Summary]) -> list[list[str]]:
    """Return the numbers of runs side by side, as rows with their names."""
    changed = any(one.losses or one.joins or one.stopped_seconds for one in summaries.values())
    columns = COLUMNS | _CHANGES if changed else COLUMNS
    if any(one.perplexity is not None for one in summaries.values()):
        columns = columns | _PERPLEXITY
    return [[label, *(show(one) for one in summaries.values())] for label, show in columns.items()]


def changes_table(runs: Mapping[str, RecordedRun]) -> ReportTable | None:
    """Return a table of the ranks that were lost and joined, or None if there were none."""
    rows = [[name, *_change_cells(change)] for name, run in runs.items() for change in run.history.changes]
    header = [
        "", "what happened", "at step", "ranks then", "noticed after", "stepping again after", "no steps for",
        "state taken from", "steps repeated",
    ]  # fmt: skip
    return ReportTable("Ranks lost and joined", header, rows, _CHANGES_NOTE) if rows else None


def _change_cells(change: Change) -> list[str]:
    silent, again = change.silent_seconds, change.recovery_seconds
    return [
        describe(change),
        f"{change.step:,}",
        str(change.ranks),
        "-" if not change.lost else human_seconds(silent) if silent else "at once",
        "-" if again is None else human_seconds(again),
        human_seconds(change.stopped),
        "-" if change.source is None else SOURCES[change.source],
        f"{change.steps_repeated:,}",
    ]


def rank_tables(runs: Mapping[str, RecordedRun]) -> list[ReportTable]:
    """Return tables of what every rank did and held, and of what it sent over every link."""
    ranks = [[name, *_rank_cells(rank)] for name, run in runs.items() for rank in run.ranks]
    header = ["", "rank", "device", "stage", *KINDS, "CPU cores", "memory, mean", "memory, peak"]
    links = [
        [name, str(link.rank), link.to, human_bytes(link.bytes_per_step), human_bytes(link.bytes_per_second) + "/s"]
        for name, run in runs.items()
        for link in traffic(run)
    ]
    tables = [ReportTable("Rank by rank", header, ranks)]
    if links:
        tables.append(ReportTable("Bytes on every link", ["", "rank", "to", "sent per step", "sent per second"], links))
    return tables


def _rank_cells(rank: RankRecords) -> list[str]:
    wall = sum(step.wall for step in rank.settled)
    return [
        str(rank.run.rank),
        printable(rank.run.host, 64),
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


STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: 0.2rem; }
h2 { font-size: 1.3rem; margin-top: 2.6rem; border-bottom: 2px solid #0072b2; padding-bottom: 0.2rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 0.4rem; }
.setting, .note, figcaption, footer { color: #555; font-size: 0.87rem; }
ul.findings { background: #f3f7fa; border-left: 4px solid #0072b2; margin: 1rem 0; padding: 0.7rem 1rem 0.7rem 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.87rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.22rem 0.7rem; text-align: right; border-bottom: 1px solid #e2e2e2; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid #999; }
figure { margin: 1.2rem 0; break-inside: avoid; }
img { max-width: 100%; height: auto; }
nav a { margin-right: 1rem; }
@media print { body { margin: 0; max-width: none; font-size: 11px; } nav { display: none; } h2 { break-before: page; }
  h2:first-of-type { break-before: auto; } tr { break-inside: avoid; } }
"""


def render(sections: Sequence[Section]) -> str:
    """Return the page as HTML. Raises OSError if a picture cannot be read."""
    escape = html.escape
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>HorizonML report</title><style>{STYLE}</style></head><body>",
        "<h1>HorizonML report</h1>",
    ]
    if len(sections) > 1:
        links = (f'<a href="#s{number}">{escape(section.title)}</a>' for number, section in enumerate(sections))
        parts.append(f"<nav>{''.join(links)}</nav>")
    for number, section in enumerate(sections):
        parts.append(f'<h2 id="s{number}">{escape(section.title)}</h2>')
        parts.append(f'<p class="setting">{escape(section.setting)}</p>')
        if section.findings:
            items = "".join(f"<li>{escape(text)}</li>" for text in section.findings)
            parts.append(f'<ul class="findings">{items}</ul>')
        for picture in section.pictures:
            parts.append(_figure(picture))
        parts += [_table(table) for table in section.tables]
    parts.append(f"<footer>Made by HorizonML {escape(__version__)}.</footer></body></html>")
    return "\n".join(parts) + "\n"


def _figure(picture: Picture) -> str:
    content = base64.b64encode(picture.path.read_bytes()).decode()
    caption = html.escape(picture.caption)
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{content}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _table(table: ReportTable) -> str:
    escape = html.escape
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<h3>{escape(table.title)}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )
