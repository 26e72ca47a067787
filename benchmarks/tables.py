"""Makes the README's tables of races, slow links and overheads from what was measured: `python -m benchmarks.tables`.

It reads `benchmarks/measured/peers.json`, which `benchmarks.ddp --save` and `benchmarks.pipeline --save` write,
`slow-links.json`, which `benchmarks.slow_links` writes, `overheads.json`, and `worth.json`, a copy of what
`benchmarks.worth` writes, and replaces what stands between two marks in the README.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.overheads import table as overheads_table
from benchmarks.quality import table as quality_table
from benchmarks.slow_links_ways import TASKS, WAYS
from benchmarks.worth import table as worth_table
from horizonml.text import count, human_seconds

HERE = Path(__file__).resolve().parent
BASE = "torch-ddp"
NOT_MEASURED = "This has not been measured yet."
EQUAL = 0.01  # accuracies that differ by no more count as equal
Runs = dict[str, dict[str, Any]]


def marks(name: str) -> tuple[str, str]:
    """The lines of the README between which a table stands."""
    return f"<!-- {name}: made by python -m benchmarks.tables -->", f"<!-- end of {name} -->"


def races(folder: Path, kind: str) -> str:
    """Tables of the races whose short titles begin with one of the words that `kind` stands for."""
    path = folder / "peers.json"
    if not path.exists():
        return ""
    words = {"ddp": ("data parallel",), "pipelines": ("tuned", "pipelines", "same cuts")}[kind]
    measured = json.loads(path.read_text())
    lines = []
    for race in measured["races"]:
        if not race["short"].startswith(words):
            continue
        base = next(row["seconds"] for row in race["rows"] if row["name"] == race["reference"])
        lines += [
            f"{race['title']}:",
            "",
            f"| | median step | samples/s | against {race['reference']} |",
            "|---|---|---|---|",
        ]
        for row in race["rows"]:
            name = f"**{row['name']}**" if row["name"].startswith("HorizonML") else row["name"]
            speed = f"{base / row['seconds']:.2f}x"
            lines.append(f"| {name} | {row['seconds'] * 1e3:.0f} ms | {row['samples_per_second']:.0f} | {speed} |")
        lines.append("")
    return "\n".join([f"Measured on {measured['machine']}.", "", *lines]).strip() if lines else ""


def steps_to(run: dict[str, Any], target: float) -> int | None:
    """The steps after which a run was first found to have the target accuracy."""
    return next((int(step) for step, found in run["accuracies"].items() if found >= target), None)


def seconds_of(timed: dict[str, Any], steps: int) -> float:
    """The seconds that so many steps take: those at the beginning, and the others at the pace that was measured."""
    return float(timed["skipped_seconds"] + (steps - timed["skipped_steps"]) * timed["step_seconds"])


def whole_runs(runs: Runs, task: str, way: str) -> list[dict[str, Any]]:
    """The runs of all seeds that tell how accurate a way becomes."""
    rate_of = (lambda run: run["rate"] > 0) if WAYS[way].planned else (lambda run: run["rate"] == 0)
    own = [run for run in runs.values() if (run.get("task"), run.get("way")) == (task, way)]
    return [run for run in own if run["whole"] and rate_of(run)]


def timed_run(runs: Runs, task: str, way: str, rate: float) -> dict[str, Any] | None:
    """The run of the lowest seed on links of a rate."""
    own = [run for run in runs.values() if (run.get("task"), run.get("way"), run.get("rate")) == (task, way, rate)]
    return min(own, key=lambda run: int(run["seed"]), default=None)


def row(runs: Runs, task: str, way: str, rates: list[float], base: float | None) -> list[str] | None:
    """The cells of a way, or None if it was not measured."""
    whole, target = whole_runs(runs, task, way), TASKS[task].target
    timed = {rate: timed_run(runs, task, way, rate) for rate in rates}
    measured = [run for run in (*whole, *timed.values()) if run is not None and "failed" not in run]
    if not measured:
        return None
    own = whole or measured
    carried = statistics.mean(run["bytes_per_sample"] for run in own)
    fewer = f"{base / carried:.0f}x" if base and carried >= 1 else "–"
    finals = [list(run["accuracies"].values())[-1] for run in whole]
    seeds = count(len({run["seed"] for run in whole}), "seed")
    if len(finals) > 1:  # there may be runs of a seed at several rates
        every = seeds if seeds.startswith(f"{len(finals)} ") else f"{len(finals)} runs with {seeds}"
        seeds = f"worst of {every}: {min(finals):.2%}"
    accuracy = f"{statistics.mean(finals):.2%} ({seeds})" if finals else "–"
    like = WAYS[way].like
    reached = [steps_to(run, target) for run in (whole_runs(runs, task, like) if like else whole)]
    cells = [f"{carried:.0f}", fewer, accuracy]
    for rate in rates:
        one = timed[rate]
        if one is None or "failed" in one or (not one["whole"] and not reached):
            cells.append("–")
        elif None in reached:
            missed = f"not reached by {reached.count(None)} of {len(reached)}"
            cells.append(f"{missed} ({human_seconds(one['step_seconds'])} a step)")
        else:
            steps = [step for step in reached if step is not None]
            seconds = statistics.median(seconds_of(one, step) for step in steps)
            waited = "" if one["whole"] else "≈ "
            cells.append(f"{waited}{human_seconds(seconds)} ({human_seconds(one['step_seconds'])} a step)")
    return cells


def slow_links(folder: Path) -> str:
    """A table for each task."""
    path = folder / "slow-links.json"
    if not path.exists():
        return ""
    measured = json.loads(path.read_text())
    runs: Runs = measured["runs"]
    rates = sorted({run["rate"] for run in runs.values() if run.get("rate")}, reverse=True)
    lines = [f"Measured on {measured['machine']}.", ""]
    for name, task in TASKS.items():
        base = [run["bytes_per_sample"] for run in whole_runs(runs, name, BASE)]
        reference = statistics.mean(base) if base else None
        if not any(run.get("task") == name for run in runs.values()):
            continue
        lines += [f"{task.title[0].upper()}{task.title[1:]}; target {task.target:.0%}:", ""]
        titles = [
            "bytes per sample",
            "fewer",
            "held-out accuracy",
            *(f"to {task.target:.0%}, {rate:g} Mbit/s" for rate in rates),
        ]
        lines += ["| | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
        for way in WAYS.values():
            cells = row(runs, name, way.name, rates, reference)
            if cells is not None:
                title = f"**{way.title}**" if way.title.startswith("HorizonML") else way.title
                lines.append(f"| {title} | " + " | ".join(cells) + " |")
        lines.append("")
    failed = [f"- {key}: {run['failed'].splitlines()[-1]}" for key, run in runs.items() if "failed" in run]
    return "\n".join([*lines, *(["What failed:", "", *failed] if failed else [])]).strip()


def worth(folder: Path) -> str:
    """What connecting devices is worth."""
    path = folder / "worth.json"
    return worth_table(json.loads(path.read_text())) if path.exists() else ""


def overheads(folder: Path) -> str:
    """The parts of a step that are not training."""
    path = folder / "overheads.json"
    if not path.exists():
        return ""
    lines = overheads_table(json.loads(path.read_text())["rows"]).splitlines()
    return "\n".join(f"  {line}" for line in lines)


def quality(folder: Path) -> str:
    """What local steps cost a language model."""
    path = folder / "quality.json"
    return quality_table(json.loads(path.read_text())["runs"]) if path.exists() else ""


TABLES: dict[str, Callable[[Path], str]] = {
    "ddp races": lambda folder: races(folder, "ddp"),
    "pipeline races": lambda folder: races(folder, "pipelines"),
    "slow links": slow_links,
    "overheads": overheads,
    "worth": worth,
    "quality": quality,
}


def main() -> None:
    """Replace the tables in the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "measured")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    options = parser.parse_args()
    text = options.readme.read_text()
    for name, make in TABLES.items():
        begin, end = marks(name)
        if begin not in text:
            continue
        before, rest = text.split(begin)
        indent = " " * (len(before) - len(before.rstrip(" ")))
        made = make(options.results) or f"{indent}{NOT_MEASURED}"
        text = f"{before}{begin}\n\n{made}\n\n{indent}{end}{rest.split(end)[1]}"
        print(f"{made}\n")
    options.readme.write_text(text)


if __name__ == "__main__":
    main()
