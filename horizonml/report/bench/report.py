"""Writes one page about everything that was run below a folder: studies, and training runs of any kind.

The page is one HTML file with its pictures inside; the same pictures, and the numbers as CSV and JSON, lie beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel

from horizonml.errors import HorizonError
from horizonml.files import write_atomically, writing
from horizonml.report import charts, run_plots
from horizonml.report.bench import batch_size, compare, scaling
from horizonml.report.bench.study import Study, load_study, write_data
from horizonml.report.records import RecordedRun, load_run
from horizonml.report.section import (
    NOTE,
    Picture,
    ReportTable,
    Section,
    changes_table,
    number_rows,
    rank_tables,
    render,
    write_numbers,
)
from horizonml.report.summary import Summary, summarise, traffic
from horizonml.text import count, human_bytes, human_seconds, percent

_OURS = "HorizonML"


class Competitor(BaseModel):
    """One library, or one way of using it, in a race."""

    name: str
    seconds: float  # of the median step
    times: list[float]  # of all steps
    samples_per_second: float
    batch_size: int
    rss_bytes: float  # of the largest rank

    @property
    def speeds(self) -> list[float]:
        """Return the samples per second of every step."""
        return [self.batch_size / seconds for seconds in self.times]


class Race(BaseModel):
    """Libraries that did the same work and took turns."""

    title: str
    short: str  # the title of its picture
    reference: str  # the name of the one that the others are compared with
    rows: list[Competitor]


class Races(BaseModel):
    """The file that the benchmarks write."""

    machine: str
    races: list[Race]


def section(path: Path) -> Section:
    """Return what is in the JSON file that the benchmarks write. Raises HorizonError.

    Pictures are written beside the file.
    """
    try:
        document = Races.model_validate_json(path.read_bytes())
        described = [_describe(race) for race in document.races]
    except (OSError, ValueError) as error:
        raise HorizonError(f"{path} cannot be read: {error}") from error
    result = Section(
        "Beside other libraries",
        "Same model, batch, threads and number of ranks; all ranks of all competitors live at once and take turns, and "
        f"medians of the slowest rank's steps are compared. {document.machine}",
    )
    for race, (finding, table) in zip(document.races, described, strict=True):
        result.findings.append(finding)
        result.tables.append(table)
        picture = charts.ranking(
            {row.name: row.speeds for row in race.rows},
            path.parent / f"{race.short.replace(' ', '-').replace(',', '')}.png",
            title=f"Samples per second: {race.short}",
            own=_OURS,
            unit="samples/s",
        )
        result.pictures.append(Picture(picture, f"{race.title}. Lines reach from the slowest to the fastest step."))
    return result


def _describe(race: Race) -> tuple[str, ReportTable]:
    """Return who wins a race, and its numbers. Raises ValueError if a side is missing."""
    base = next((row for row in race.rows if row.name == race.reference), None)
    own = [row for row in race.rows if row.name.startswith(_OURS)]
    others = [row for row in race.rows if not row.name.startswith(_OURS)]
    if base is None or not own or not others:
        raise ValueError(f"{race.title}: a race needs {_OURS}, another library and {race.reference}")
    rows = [
        [
            row.name,
            f"{1000 * row.seconds:.1f} ms",
            f"{row.samples_per_second:,.0f}",
            f"{base.seconds / row.seconds:.2f}x",
            human_bytes(row.rss_bytes),
        ]
        for row in race.rows
    ]
    ours, nearest = (min(side, key=lambda row: row.seconds) for side in (own, others))
    finding = (
        f"{race.title}: {ours.name} takes {nearest.seconds / ours.seconds:.2f} times as many samples per second as the "
        f"fastest other, {nearest.name}."
    )
    header = ["", "median step", "samples/s", f"against {race.reference}", "memory, peak rank"]
    return finding, ReportTable(race.title, header, rows)


SECTIONS: dict[str, Callable[[Study], Section]] = {
    "compare": compare.section,
    "scaling": scaling.section,
    "batch-size": batch_size.section,
}
_ORDER = (*SECTIONS, "libraries", "runs")


def write_report(folder: Path, page: Path | None = None) -> list[Path]:
    """Write `folder/report.html`, or `page`, about all that lies below `folder`, and return all files written.

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
        found.append((_ORDER.index("libraries"), str(path), section(path)))
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


def _other_runs(folder: Path, studies: list[Path]) -> Iterator[tuple[str, RecordedRun]]:
    """Yield the runs that belong to no study, by their place."""
    for place in sorted({path.parent for path in folder.rglob("rank-*.jsonl")}):
        if any(study in place.parents for study in studies) or place.name.endswith(".previous"):
            continue
        try:
            yield str(place.relative_to(folder)) if place != folder else place.resolve().name, load_run("", place)
        except HorizonError:
            continue  # ended before its first step


def runs_section(folder: Path, runs: Mapping[str, RecordedRun]) -> Section:
    """Return a section about training runs as they are. Pictures are written to `folder`."""
    summaries = {name: summarise(run) for name, run in runs.items()}
    title = "Training runs" if len(runs) > 1 else f"Training run {next(iter(runs))}"
    result = Section(title, " ".join(_setting(name, run) for name, run in runs.items()))
    result.findings += [_finding(name, runs[name], one) for name, one in summaries.items()]
    result.tables.append(ReportTable("Numbers", ["", *summaries], number_rows(summaries), NOTE))
    changes = changes_table(runs)
    if changes is not None:
        result.tables.append(changes)
    result.tables += rank_tables(runs)
    result.pictures += [
        Picture(charts.save(run_plots.draw_learning_curves(runs), folder / "learning-curves.png"), "How it learned."),
        Picture(run_plots.time_split(runs, folder / "time-split.png"), "Where the time of an average step went."),
    ]
    for name, run in runs.items():
        if run.history.changes:
            picture = folder / f"changes-{name.replace('/', '-')}.png"
            caption = f"What {name} did while ranks were lost and joined."
            result.pictures.append(Picture(charts.save(run_plots.draw_changes(name, run), picture), caption))
        picture = folder / f"timeline-{name.replace('/', '-')}.png"
        path = run_plots.timeline(name, run, picture) if len(run.stages) > 1 else None
        if path is not None:
            result.pictures.append(Picture(path, f"One step of {name}: who worked on what, and who waited."))
    return result


def _finding(name: str, run: RecordedRun, one: Summary) -> str:
    texts = [f"{name}: {one.updates:,} updates at {one.samples_per_second:,.0f} samples/s"]
    if one.accuracy is not None:
        texts.append(f"held-out accuracy {one.accuracy:.1%}")
    if one.perplexity is not None:
        beside = f" (unigram baseline {one.unigram:.1f})" if one.unigram is not None else ""
        texts.append(f"held-out perplexity {one.perplexity:.2f}{beside}")
    if one.ranks > 1:
        compute, transfer, wait = map(percent, (one.compute, one.transfer, one.wait))
        texts.append(f"{compute} of the time compute, {transfer} transfer, {wait} wait")
        slowest = max(run.ranks, key=lambda rank: sum(step.compute for step in rank.settled))
        texts.append(f"rank {slowest.run.rank} computes longest")
    if run.worth is not None:
        texts.append(run.worth.words)
    if run.missing:
        ranks = ", ".join(map(str, run.missing))
        texts.append(f"without the times and bytes of rank {ranks}, which the device of rank 0 has recorded")
    if one.losses or one.joins:
        texts.append(_faults(one))
    return "; ".join(texts) + "."


def _faults(one: Summary) -> str:
    """Return what losses and joins have cost."""
    stopped = f"no steps for {human_seconds(one.stopped_seconds)}" if one.stopped_seconds else "no pause"
    repeated = f"{count(one.steps_repeated, 'step')} repeated" if one.steps_repeated else "no step repeated"
    happened = f"{count(one.losses, 'loss')} and {count(one.joins, 'join')} of ranks"
    return f"{happened}: {stopped}, {repeated}, goodput {percent(one.goodput, 1)}"


def _setting(name: str, run: RecordedRun) -> str:
    about = run.lead.run
    processor = about.machine.processor if about.machine is not None else "unknown processor"
    facts = [processor, *(f"{key} {value}" for key, value in about.versions.items())]
    if about.job is not None:
        job = about.job
        trained = f"{job.model.name} on {job.data.name}"
        facts = [trained, f"batch size {job.batch_size}", f"seed {job.seed}", *facts]
    return f"{name}: {', '.join(facts)}."


def _write_runs(folder: Path, runs: Mapping[str, RecordedRun]) -> list[Path]:
    """Write the numbers of runs as CSV and JSON, and return the paths of both. Raises JobError."""
    summaries = {name: summarise(run).to_json() for name, run in runs.items()}
    document = {
        name: {"summary": summaries[name], "links": [dataclasses.asdict(link) for link in traffic(run)]}
        for name, run in runs.items()
    }
    return write_numbers(folder / "runs", [{"run": name, **one} for name, one in summaries.items()], document)
