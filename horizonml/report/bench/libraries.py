"""Shows what `benchmarks/` measured: other libraries beside HorizonML, as a part of the report."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from horizonml.errors import HorizonError
from horizonml.report import charts
from horizonml.report.section import Picture, ReportTable, Section
from horizonml.text import human_bytes

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
