"""Whether connecting devices is worth it, measured on emulated clusters: `python -m benchmarks.worth`.

Five containers with quotas of processor time and shaped links train a job by the plan that HorizonML makes, exactly,
and by the plan that it makes for a long run with `exact: false`. At the end of each run every device measures what it
would do alone, so both sides of the comparison come from one run. Efficiency is the speed of all devices, divided by
the sum of those; 1 would be perfect. Needs what `make hetero` needs.

With `--sharing`, the devices train by themselves instead, one after the other and then all at once. Real devices do not
share caches and memory as these containers do, so this is how much of a missing efficiency is due to the emulation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.emulated import ROOT, EmulatedCluster, Measured, base_job, with_plan
from benchmarks.hetero import automatic, problem_on, shape_of
from horizonml.engine.sync.compressed import WHOLE_STEPS
from horizonml.files import write_atomically
from horizonml.job.jobfile import changed, parse
from horizonml.job.schema import Job
from horizonml.planner.choose import best_plan
from horizonml.report.charts import save
from horizonml.text import human_seconds, percent

# Cores of the devices. On two cores, quotas that add up to both are not to be had: processes that run at the beginning
# of a tenth of a second share the cores alike, and what a large quota has missed by then does not fit into the rest.
CLUSTERS = {
    "five equal": (0.3, 0.3, 0.3, 0.3, 0.3),
    "five unequal": (0.6, 0.3, 0.3, 0.15, 0.15),
    "two fast, three slow": (0.5, 0.5, 0.15, 0.15, 0.15),
    "five equal, all cores": (0.4, 0.4, 0.4, 0.4, 0.4),
    "five unequal, all cores": (0.8, 0.4, 0.4, 0.2, 0.2),
}
USUAL = ("five equal", "five unequal", "two fast, three slow")
_MEMORY = "1200m"  # of each device
LINKS = ("100mbit", "20mbit")
_SECONDS = 40.0  # of steps in a run, at least
_FEWEST, _MOST = 4, 40  # steps
_LOCAL_ROUNDS = 3  # synchronisations of a run with local steps, at least
_SHARING_STEPS = 12  # of the fastest device
_LONG = 1000  # epochs, so that a plan may have local steps

Row = dict[str, Any]
_Run = tuple[str, Job, float | None, int | None, int]  # way, job, predicted seconds, local steps, steps unlike others


def jobs() -> dict[str, Job]:
    """What is trained."""
    hetero = base_job()
    mobile = {"model.name": "mobilenet_v3_small", "data.image_size": 96, "batch_size": 256}
    text = """
    name: gpt
    batch_size: 16
    epochs: 1
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
    planned: dict[tuple[str, ...], list[_Run]] = {}
    for name in clusters:
        with EmulatedCluster(out, CLUSTERS[name], _MEMORY) as cluster:
            for _ in range(rounds):
                for link in links:
                    cluster.shape([link] * len(CLUSTERS[name]))
                    for model in models:
                        setting = (name, link, model)
                        for found in _train(cluster, out, jobs()[model], setting, rows, planned):
                            print(f"    {found.run.worth.words if found.run.worth else ''}", flush=True)
                            write_atomically(out / "worth.json", (json.dumps(list(rows.values()), indent=1)).encode())
    return list(rows.values())


def _train(
    cluster: EmulatedCluster,
    out: Path,
    job: Job,
    setting: tuple[str, str, str],
    rows: dict[tuple[str, ...], Row],
    planned: dict[tuple[str, ...], list[_Run]],
) -> Iterator[Measured]:
    """Train by an exact plan, for which devices and links are measured, then by the one that need not be exact.

    Later rounds train by the plans of the first, so that a range shows what the measurement is worth.
    """

    def train(way: str, job: Job, predicted: float | None, every: int | None = None, unlike: int = 0) -> Measured:
        key = (*setting, way)
        row = rows.setdefault(key, dict(zip(("cluster", "links", "model", "way"), key, strict=True)))
        steps = _steps(row.get("seconds") or predicted, every)
        print(f"{', '.join(key)}: {steps} steps ...", flush=True)
        found = cluster.train(_name(key), job, steps, 1200, unlike)
        _add(row, found, predicted or found.forecast)
        return found

    if setting in planned:
        for run in planned[setting]:
            yield train(*run)
        return
    exact = train("exact", automatic(job, True), None)
    yield exact
    measured = _name((*setting, "exact"))
    long = changed(automatic(job), {"epochs": _LONG})
    chosen = best_plan(problem_on(cluster.measured(measured), long, out / "runs" / measured))
    every = chosen.plan.local.every if chosen.plan.local is not None else None
    unlike = WHOLE_STEPS if any(stage.sync.name == "powersgd" for stage in chosen.plan.stages) else 0
    inexact = ("exact: false", with_plan(job, chosen.plan), chosen.prediction.seconds, every, unlike)
    # A job cannot name a plan that leaves devices out, so such a plan is made again.
    again = automatic(job, True) if exact.plan.spare else with_plan(job, exact.plan)
    planned[setting] = [("exact", again, exact.forecast, None, 0), inexact]
    yield train(*inexact)


def sharing(out: Path, name: str, job: Job) -> tuple[list[float], list[float]]:
    """Return each device's samples per second by itself: one after the other, and while all of them train."""
    quotas, single = CLUSTERS[name], changed(job, {"parallel.strategy": "single", "parallel.threads": 1})

    def rate(worker: int, how: str) -> float:
        steps = max(_FEWEST, round(_SHARING_STEPS * quotas[worker] / max(quotas))) + 2  # of which two do not count
        key = _name((name, job.name, how, str(worker)))
        return cluster.train(key, single, steps, 1200, alone=worker).samples_per_second

    with EmulatedCluster(out, quotas, _MEMORY) as cluster, ThreadPoolExecutor(len(quotas)) as pool:
        turns = [rate(worker, "in turn") for worker in range(len(quotas))]
        return turns, list(pool.map(lambda worker: rate(worker, "at once"), range(len(quotas))))


def _name(key: Sequence[str]) -> str:
    return re.sub("[^a-z0-9]+", "-", "-".join(key))


def _steps(seconds: float | None, every: int | None) -> int:
    usual = int(min(_MOST, max(_FEWEST, _SECONDS / (seconds or 2.0))))
    return max(usual, _LOCAL_ROUNDS * every + 2) if every else usual


def _add(row: Row, found: Measured, predicted: float | None) -> None:
    """Add what a run has measured."""
    measured = found.run.worth
    assert measured is not None, "a run that has come to its end has measured every device"
    worth = replace(measured, together=found.samples_per_second)  # without steps that are unlike those of a long run
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
    row["plan"], row["predicted"] = shape_of(found.plan), predicted
    row["seconds"] = statistics.median(row["times"])


def _split(found: Measured) -> Mapping[str, float]:
    """Which parts of their time the ranks spend in what, on average; it says what binds."""
    steps = [step for rank in found.run.ranks for step in rank.steps]
    wall = sum(step.wall for step in steps)
    return {kind: sum(getattr(step, kind) for step in steps) / wall for kind in ("compute", "transfer", "wait")}


def table(rows: Sequence[Row]) -> str:
    """Medians in Markdown, with their range where there are several rounds."""
    header = [
        "model",
        "cluster",
        "links",
        "",
        "efficiency",
        "speed-up",
        "a step",
        "predicted",
        "time of a rank",
        "plan",
    ]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for row in rows:
        known = [one for one in row["efficiencies"] if one is not None]
        efficiency = percent(statistics.median(known)) if known else "–"
        if len(known) > 1:
            efficiency += f" ({percent(min(known))} to {percent(max(known))})"
        split = ", ".join(f"{percent(share)} {kind}" for kind, share in row["time_split"][-1].items())
        predicted = human_seconds(row["predicted"]) if row["predicted"] else "–"
        cells = [row["model"], row["cluster"], row["links"], row["way"], efficiency]
        cells += [f"{statistics.median(row['speed_ups']):.2f}", human_seconds(row["seconds"]), predicted, split]
        lines.append("| " + " | ".join([*cells, row["plan"].replace("|", "/")]) + " |")
    return "\n".join(lines)


_BARS = {  # colours of what is compared, in order
    "fastest device alone": "#8c8c8c",
    "exact, 20 Mbit/s": "#9ecae1",
    "exact, 100 Mbit/s": "#0072B2",
    "exact: false, 20 Mbit/s": "#8fd3bf",
    "exact: false, 100 Mbit/s": "#009E73",
    "sum of what each does alone": "#e6e6e6",
}


def draw(rows: Sequence[Row], model: str, path: Path) -> None:
    """Each cluster's speed-up over its fastest device, for one model, beside what all of its devices add up to."""
    clusters = list(dict.fromkeys(row["cluster"] for row in rows if row["model"] == model))
    values: dict[str, dict[str, list[float]]] = {name: {} for name in _BARS}
    for row in rows:
        if row["model"] != model:
            continue
        values.setdefault(f"{row['way']}, {row['links'].replace('mbit', ' Mbit/s')}", {})[row["cluster"]] = row[
            "speed_ups"
        ]
        pairs = zip(row["speed_ups"], row["efficiencies"], strict=True)
        ideal = [gain / share for gain, share in pairs if share]
        values["sum of what each does alone"].setdefault(row["cluster"], []).extend(ideal)
        values["fastest device alone"][row["cluster"]] = [1.0]
    figure = Figure(figsize=(9, 4), layout="constrained")
    axis, width = figure.subplots(), 0.85 / len(values)
    for place, (name, own) in enumerate(values.items()):
        heights = [statistics.median(own[cluster]) if own.get(cluster) else 0.0 for cluster in clusters]
        at = [number + (place - (len(values) - 1) / 2) * width for number in range(len(clusters))]
        shown = axis.bar(
            at, heights, 0.92 * width, color=_BARS.get(name), label=name, edgecolor="#555555", linewidth=0.4
        )
        axis.bar_label(shown, [f"{height:.1f}" if height else "" for height in heights], fontsize=9, padding=2)
    cores = {cluster: " ".join(f"{quota:g}" for quota in CLUSTERS[cluster]) for cluster in clusters}
    axis.set_xticks(range(len(clusters)), [f"{cluster}\n({own} cores)" for cluster, own in cores.items()])
    axis.grid(visible=False, axis="x")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axis.set_title(
        f"Five emulated devices train {model}: samples per second, relative to the fastest alone", loc="left"
    )
    figure.legend(loc="outside lower center", ncols=3)
    save(figure, path)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=USUAL)
    parser.add_argument("--models", nargs="+", choices=list(jobs()), default=list(jobs()))
    parser.add_argument("--links", nargs="+", default=LINKS, help="rates of all links, one after the other")
    parser.add_argument("--rounds", type=int, default=1, help="how often to measure everything, in turns")
    parser.add_argument("--out", type=Path, default=Path("runs/worth"), help="folder for records and results")
    parser.add_argument("--sharing", action="store_true", help="measure what sharing this machine costs, instead")
    parser.add_argument("--save", action="store_true", help="also write what the tables are made from, and the picture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.sharing:
        for name, model in itertools.product(options.clusters, options.models):
            turns, together = sharing(options.out, name, jobs()[model])
            rates, share = " ".join(f"{rate:.1f}" for rate in (*turns, *together)), percent(sum(together) / sum(turns))
            print(f"{name}, {model}: all at once {share} of one after the other ({rates})", flush=True)
        return
    rows = measure(options.out, options.clusters, options.models, options.links, options.rounds)
    print(table(rows))
    for model in options.models:
        draw(rows, model, options.out / f"worth-{model}.png")
    if options.save:
        write_atomically(ROOT / "benchmarks" / "measured" / "worth.json", json.dumps(rows, indent=1).encode())
        draw(rows, options.models[0], ROOT / "docs" / "images" / "worth.png")


if __name__ == "__main__":
    main()
