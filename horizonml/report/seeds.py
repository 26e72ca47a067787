"""Compares runs of one job that differ in their seeds: the mean of what they reached, and how far apart they are.

Writes sections as one HTML page, with its pictures inside.
"""

from __future__ import annotations

import base64
import html
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from horizonml import __version__
from horizonml.errors import HorizonError
from horizonml.report.records import lead_records
from horizonml.report.section import Picture, Section, Table, Value
from horizonml.telemetry.record import EvaluationRecord


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
    last = next((one for one in reversed(lead_records(folder)) if isinstance(one, EvaluationRecord)), None)
    if last is None:
        raise HorizonError(f"{folder} has no records of an evaluation")
    return {f"held_out_{name}": value for name, value in {"loss": last.loss, **last.metrics}.items()}


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


def _table(table: Table) -> str:
    escape = html.escape
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<h3>{escape(table.title)}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )
