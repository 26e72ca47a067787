"""One page about everything that was run below a folder: studies, and training runs of any kind.

The page is one HTML file with its pictures inside; the same pictures, and the numbers as CSV and JSON, lie beside it.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from horizonml import __version__
from horizonml.bench import batch_size, compare, libraries, scaling
from horizonml.bench.results import Run, load_run, summarise, traffic
from horizonml.bench.section import (
    COLUMNS,
    NOTE,
    Picture,
    Section,
    Table,
    percent,
    rank_tables,
    write_data,
    write_numbers,
)
from horizonml.bench.study import Study, load_study
from horizonml.errors import HorizonError
from horizonml.files import write_atomically, writing
from horizonml.report import run_plots

SECTIONS: dict[str, Callable[[Study], Section]] = {
    "compare": compare.section,
    "scaling": scaling.section,
    "batch-size": batch_size.section,
}
_ORDER = ("compare", "scaling", "batch-size", "peers", "runs")


def write_report(folder: Path, page: Path | None = None) -> list[Path]:
    """Write `folder/report.html` (or `page`) about all that lies below `folder`; returns all files written.

    Raises HorizonError if there is nothing to report on.
    """
    if not folder.is_dir():
        raise HorizonError(f"{folder} is not a folder; give that of a run (runs/NAME) or of a bench")
    files: list[Path] = []
    found: list[tuple[int, str, Section]] = []
    studies = sorted(path.parent for path in folder.rglob("study.json"))
    for place in studies:
        study = load_study(place)
        if study.kind not in SECTIONS:
            raise HorizonError(f"{place / 'study.json'}: {study.kind!r} is no kind of study that this version knows")
        found.append((_ORDER.index(study.kind), str(place), SECTIONS[study.kind](study)))
        if study.succeeded:
            files += write_data(study)
    for path in sorted(folder.rglob("peers.json")):
        found.append((_ORDER.index("peers"), str(path), libraries.section(path)))
        files.append(path)
    runs = dict(_other_runs(folder, studies))
    if runs:
        found.append((_ORDER.index("runs"), "", runs_section(folder, runs)))
        files += _write_runs(folder, runs)
    if not found:
        raise HorizonError(f"{folder} has no records: neither of a run (rank-*.jsonl) nor of a bench (study.json)")
    sections = [section for _, _, section in sorted(found, key=lambda item: item[:2])]
    files += [picture.path for section in sections for picture in section.pictures]
    target = page or folder / "report.html"
    with writing(target):
        write_atomically(target, render(sections).encode())
    return [target, *files]


def _other_runs(folder: Path, studies: list[Path]) -> Iterator[tuple[str, Run]]:
    """Runs that belong to no study, by their place."""
    for place in sorted({path.parent for path in folder.rglob("rank-*.jsonl")}):
        if any(study in place.parents for study in studies) or place.name.endswith(".previous"):
            continue
        try:
            yield str(place.relative_to(folder)) if place != folder else place.resolve().name, load_run("", place)
        except HorizonError:
            continue  # ended before its first step


def runs_section(folder: Path, runs: dict[str, Run]) -> Section:
    """About training runs as they are; pictures are written to `folder`."""
    summaries = {name: summarise(run) for name, run in runs.items()}
    result = Section("Training runs" if len(runs) > 1 else f"Training run {next(iter(runs))}", _setting(runs))
    for name, one in summaries.items():
        texts = [f"{name}: {one.updates:,} updates at {one.samples_per_second:,.0f} samples/s"]
        if one.accuracy is not None:
            texts.append(f"held-out accuracy {one.accuracy:.1%}")
        if one.ranks > 1:
            compute, transfer, wait = map(percent, (one.compute, one.transfer, one.wait))
            texts.append(f"{compute} of the time compute, {transfer} transfer, {wait} wait")
            slowest = max(runs[name].ranks, key=lambda rank: sum(s["compute"] for s in rank.settled))
            texts.append(f"rank {slowest.run['rank']} computes longest")
        result.findings.append("; ".join(texts) + ".")
    rows = [[label, *(show(one) for one in summaries.values())] for label, show in COLUMNS.items()]
    result.tables.append(Table("Numbers", ["", *summaries], rows, NOTE))
    result.tables += rank_tables(runs)
    result.pictures += [
        Picture(run_plots.learning_curves(runs, folder / "learning-curves.png"), "How it learned."),
        Picture(run_plots.time_split(runs, folder / "time-split.png"), "Where the time of an average step went."),
    ]
    for name, run in runs.items():
        picture = folder / f"timeline-{name.replace('/', '-')}.png"
        path = run_plots.timeline(name, run, picture) if len(run.stages) > 1 else None
        if path is not None:
            result.pictures.append(Picture(path, f"One step of {name}: who worked on what, and who waited."))
    return result


def _setting(runs: dict[str, Run]) -> str:
    parts = []
    for name, run in runs.items():
        job, about = run.lead.run["job"], run.lead.run
        versions = ", ".join(f"{key} {value}" for key, value in about.get("versions", {}).items())
        parts.append(
            f"{name}: {job['model']['name']} on {job['data']['name']}, batch size {job['batch_size']}, seed "
            f"{job.get('seed', 0)}, {about.get('machine', {}).get('processor', 'unknown processor')}, {versions}."
        )
    return " ".join(parts)


def _write_runs(folder: Path, runs: dict[str, Run]) -> list[Path]:
    document: dict[str, Any] = {
        name: {"summary": vars(summarise(run)), "links": [vars(link) for link in traffic(run)]}
        for name, run in runs.items()
    }
    rows = [{"run": name, **one["summary"]} for name, one in document.items()]
    return write_numbers(folder / "runs", rows, document)


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


def render(sections: list[Section]) -> str:
    """The page."""
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
            content = base64.b64encode(picture.path.read_bytes()).decode()
            caption = escape(picture.caption)
            parts.append(
                f'<figure><img alt="{caption}" src="data:image/png;base64,{content}">'
                f"<figcaption>{caption}</figcaption></figure>"
            )
        parts += [_table(table) for table in section.tables]
    parts.append(f"<footer>Made by HorizonML {escape(__version__)}.</footer></body></html>")
    return "\n".join(parts) + "\n"


def _table(table: Table) -> str:
    escape = html.escape
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<h3>{escape(table.title)}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )
