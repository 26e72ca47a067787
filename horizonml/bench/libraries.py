"""What `benchmarks/` measured: other libraries beside HorizonML, as a part of the report."""

from __future__ import annotations

import json
from pathlib import Path

from horizonml.bench.section import Picture, Section, Table
from horizonml.errors import HorizonError
from horizonml.report import charts
from horizonml.text import human_bytes


def section(path: Path) -> Section:
    """From the JSON file that the benchmarks write."""
    try:
        document = json.loads(path.read_text())
        races = document["races"]
        result = Section(
            "Beside other libraries",
            "Same model, batch, threads and number of ranks; all ranks of all competitors live at once and take "
            "turns, and "
            f"medians of the slowest rank's steps are compared. {document['machine']}",
        )
        speeds: dict[str, dict[str, list[float]]] = {}
        for race in races:
            rows = []
            base = next(row for row in race["rows"] if row["name"] == race["reference"])
            for row in race["rows"]:
                ratio = base["seconds"] / row["seconds"]
                rows.append(
                    [
                        row["name"],
                        f"{1000 * row['seconds']:.1f} ms",
                        f"{row['samples_per_second']:,.0f}",
                        f"{ratio:.2f}x",
                        human_bytes(row["rss_bytes"]),
                    ]
                )
                times = [row["batch_size"] / seconds for seconds in row["times"]]
                speeds.setdefault(row["name"], {})[race["short"]] = times
            ours = min((r for r in race["rows"] if r["name"].startswith("HorizonML")), key=lambda r: r["seconds"])
            others = [r for r in race["rows"] if not r["name"].startswith("HorizonML")]
            nearest = min(others, key=lambda r: r["seconds"])
            result.findings.append(
                f"{race['title']}: {ours['name']} takes {nearest['seconds'] / ours['seconds']:.2f} times as many "
                f"samples per second as the fastest other, {nearest['name']}."
            )
            header = ["", "median step", "samples/s", f"against {race['reference']}", "memory, peak rank"]
            result.tables.append(Table(race["title"], header, rows))
    except (OSError, ValueError, KeyError, StopIteration) as error:
        raise HorizonError(f"{path} cannot be read: {error}") from error
    for race in races:
        picture = charts.ranking(
            {row["name"]: speeds[row["name"]][race["short"]] for row in race["rows"]},
            path.parent / f"{race['short'].replace(' ', '-').replace(',', '')}.png",
            title=f"Samples per second: {race['short']}",
            own="HorizonML",
            unit="samples/s",
        )
        result.pictures.append(Picture(picture, f"{race['title']}. Lines reach from the slowest to the fastest step."))
    return result
