"""Whether connecting devices is worth it, measured on emulated clusters: `python -m benchmarks.worth`.

Five containers with quotas of processor time and shaped links train a job, exactly and with what `exact: false` allows,
by the plan that HorizonML makes. At the end of each run every device measures what it would do alone, so both sides of
the comparison come from one run. Efficiency is the speed of all devices, divided by the sum of those; 1 would be
perfect. Needs what `make hetero` needs.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.emulated import EmulatedCluster, Measured, base_job
from benchmarks.hetero import automatic, shape_of
from horizonml.cli.tables import print_table
from horizonml.files import write_atomically
from horizonml.job.jobfile import changed, parse
from horizonml.job.schema import Job
from horizonml.text import human_seconds, percent

CLUSTERS = {
    "five equal": (0.4, 0.4, 0.4, 0.4, 0.4),
    "five unequal": (0.8, 0.4, 0.4, 0.2, 0.2),
    "two fast, three slow": (0.7, 0.7, 0.2, 0.2, 0.2),
}
LINKS = ("100mbit", "20mbit")
_SECONDS = 40.0  # of steps in a run, at least
_FEWEST, _MOST = 4, 40  # steps
_LOCAL_ROUNDS = 3  # synchronisations of a run with local steps, at least

Row = dict[str, Any]


def jobs() -> dict[str, Job]:
    """What is trained."""
    hetero = base_job()
    mobile = {"model.name": "mobilenet_v3_small", "data.image_size": 96, "batch_size": 256}
    text = """
    name: gpt
    batch_size: 128
    model: {name: gpt, options: {layers: 6, heads: 6, width: 372}}
    data: {name: text, tokens: characters, length: 64, stride: 4, holdout: 0.05}
    optimizer: {name: adamw, lr: 1e-3}
    rendezvous: {timeout: 180}
    checkpoint: {enabled: false}
    telemetry: {divergence_every: 0, timeline_every: 4}
    """
    return {"resnet18": hetero, "mobilenet_v3_small": changed(hetero, mobile), "gpt": parse(text, "gpt", [])}


def measure(out: Path, clusters: Sequence[str], models: Sequence[str], links: Sequence[str], rounds: int) -> list[Row]:
    """Train in all ways, one after the other, and return what came out."""
    rows: dict[tuple[str, ...], Row] = {}
    for name in clusters:
        with EmulatedCluster(out, CLUSTERS[name]) as cluster:
            for round_ in range(rounds):
                for link in links:
                    cluster.shape([link] * len(CLUSTERS[name]))
                    for model in models:
                        for way, exact in (("exact", True), ("exact: false", False)):
                            key = (name, link, model, way)
                            row = rows.setdefault(
                                key, dict(zip(("cluster", "links", "model", "way"), key, strict=True))
                            )
                            job = automatic(jobs()[model], exact)
                            steps = _steps(row.get("seconds") or row.get("predicted"), row.get("every"))
                            print(f"{', '.join(key)}, round {round_ + 1}: {steps} steps ...", flush=True)
                            name_of_run = re.sub("[^a-z0-9]+", "-", "-".join(key))
                            _add(row, cluster.train(name_of_run, job, steps, 1200))
                            print(f"    {row['words'][-1]}", flush=True)
                            write_atomically(out / "worth.json", (json.dumps(list(rows.values()), indent=1)).encode())
    return list(rows.values())


def _steps(seconds: float | None, every: int | None) -> int:
    usual = int(min(_MOST, max(_FEWEST, _SECONDS / (seconds or 2.0))))
    return max(usual, _LOCAL_ROUNDS * (every or 0) + 2) if every else usual


def _add(row: Row, found: Measured) -> None:
    """Add what a run has measured."""
    worth = found.run.worth
    assert worth is not None, "a run that has come to its end has measured every device"
    for field, value in (
        ("speed_ups", worth.speed_up),
        ("efficiencies", worth.efficiency),
        ("words", worth.words),
        ("times", found.seconds),
        ("alone", list(worth.alone)),
        ("time_split", _split(found)),
        ("sent", sum(step.bytes_sent for rank in found.run.ranks for step in rank.steps[-1:])),
    ):
        row.setdefault(field, []).append(value)
    row["plan"], row["predicted"] = shape_of(found.plan), found.forecast
    row["every"] = found.plan.local.every if found.plan.local is not None else None
    row["seconds"] = statistics.median(row["times"])


def _split(found: Measured) -> Mapping[str, float]:
    """Which parts of their time the ranks spend in what, on average; it says what binds."""
    steps = [step for rank in found.run.ranks for step in rank.steps]
    wall = sum(step.wall for step in steps)
    return {kind: sum(getattr(step, kind) for step in steps) / wall for kind in ("compute", "transfer", "wait")}


def show(rows: Sequence[Row]) -> None:
    """A table, with medians and their range where there are several rounds."""
    cells = []
    for row in rows:
        split = row["time_split"][-1]
        cells.append(
            [
                row["cluster"],
                row["links"],
                row["model"],
                row["way"],
                percent(statistics.median(row["efficiencies"])),
                f"{percent(min(row['efficiencies']))} to {percent(max(row['efficiencies']))}",
                f"{statistics.median(row['speed_ups']):.2f}",
                human_seconds(row["seconds"]),
                human_seconds(row["predicted"]) if row["predicted"] else "-",
                " ".join(f"{kind} {percent(share)}" for kind, share in split.items()),
                row["plan"],
            ]
        )
    header = ["cluster", "links", "model", "", "efficiency", "range", "speed-up", "a step", "predicted", "time", "plan"]
    print_table("What connecting devices is worth", header, cells, text=(0, 1, 2, 3, 9, 10))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--models", nargs="+", choices=list(jobs()), default=list(jobs()))
    parser.add_argument("--links", nargs="+", default=LINKS, help="rates of all links, one after the other")
    parser.add_argument("--rounds", type=int, default=1, help="how often to measure everything, in turns")
    parser.add_argument("--out", type=Path, default=Path("runs/worth"), help="folder for records and results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    show(measure(options.out, options.clusters, options.models, options.links, options.rounds))


if __name__ == "__main__":
    main()
