"""Makes the README's table of faults from what was measured: `python -m benchmarks.faults_table`.

It reads the JSON files that `benchmarks.faults` and `benchmarks.faults_peers` have written, and replaces what stands
between the two marks in the README.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MARKS = "<!-- faults: made by python -m benchmarks.faults_table -->", "<!-- end of faults -->"
COLUMNS = {
    "horizonml": "**HorizonML**",
    "before": "HorizonML before",
    "torchrun": "torchrun elastic",
    "torchft": "torchft",
}
Result = dict[str, Any]


def seconds(key: str) -> Callable[[Result], str]:
    """Median and maximum of a time, and how many rounds did not come to it."""

    def cell(result: Result) -> str:
        found, rounds = result["summary"].get(key), len(result["rounds"])
        vain = rounds - (found["of"] if found else 0)
        never = f"not in {result['deadline']:.0f} s" + (f" ({vain} of {rounds})" if found else "")
        if found is None:
            return never
        most = f" ({found['max']:.1f})" if found["of"] > 1 else ""
        return f"{found['median']:.1f} s{most}" + (f", {never}" if vain else "")

    return cell


def number(key: str) -> Callable[[Result], str]:
    """Median and maximum of a count."""

    def cell(result: Result) -> str:
        found = result["summary"].get(key)
        if found is None:
            return "–"
        return f"{found['median']:g}" + (f" ({found['max']:g})" if found["of"] > 1 else "")

    return cell


def percent(key: str) -> Callable[[Result], str]:
    """Median of a share."""
    return lambda result: f"{result['summary'][key]['median']:.1%}" if key in result["summary"] else "–"


def stall(result: Result) -> str:
    """The longest gap between two steps, and what a step usually takes."""
    if "longest gap" not in result["summary"]:
        return "never joined"
    gap, step = (result["summary"][key]["median"] for key in ("longest gap", "median step"))
    return f"{gap:.1f} s (a step: {step * 1e3:.0f} ms)"


def kills(result: Result) -> str:
    """Goodput, with the number of kills and of repeated steps."""
    one = result["rounds"][0]
    return f"{one['goodput']:.1%} ({one['kills']} kills, {one['steps']} steps, and {one['repeated']} repeated)"


def finish(result: Result) -> str:
    """Seconds to a number of steps, with those that it would take without faults."""
    one = result["rounds"][0]
    took = f"{one['took']:.0f} s" if one["took"] is not None else f"{one['steps']} steps at the deadline"
    return f"{took} ({one['kills']} kills, and {one['repeated']} repeated; without faults: {one['without']:.0f} s)"


ROWS: list[tuple[str, str, str, Callable[[Result], str]]] = [
    *((f"kill -9, {plan}: the others step again", "kill", plan, seconds("again")) for plan in ("ddp", "hybrid")),
    ("kill -9, pipeline: the others step again", "kill", "pipeline", seconds("again")),
    *((f"kill -9, {plan}: steps repeated", "kill", plan, number("repeated")) for plan in ("ddp", "hybrid")),
    ("kill -9, pipeline: steps repeated", "kill", "pipeline", number("repeated")),
    ("silent loss (SIGSTOP): noticed", "silent", "ddp", seconds("noticed")),
    ("silent loss (SIGSTOP): the others step again", "silent", "ddp", seconds("again")),
    ("silent loss (cut cable): noticed", "cut", "ddp", seconds("noticed")),
    ("silent loss (cut cable): the others step again", "cut", "ddp", seconds("again")),
    ("replacement, 3 s after the kill: all step again", "replace", "ddp", seconds("all")),
    ("a rank returns: longest gap between the others' steps", "join", "ddp", stall),
    ("one more rank joins: longest gap between the others' steps", "grow", "ddp", stall),
    ("kill every 30 s, each restarted: goodput", "goodput", "ddp", kills),
    ("3,000 steps, a kill every 30 s, each restarted", "finish", "ddp", finish),
    *((f"mirroring without faults, {plan}: cost", "mirror", plan, percent("cost")) for plan in ("hybrid", "pipeline")),
]


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and maximum of each number, over the rounds that have it."""
    found: dict[str, Any] = {}
    for key in {key: None for one in rounds for key in one}:
        values = [one[key] for one in rounds if isinstance(one.get(key), int | float) and key != "rank"]
        if values:
            found[key] = {"median": statistics.median(values), "max": max(values), "of": len(values)}
    return found


def show(rounds: list[dict[str, Any]]) -> str:
    """A table of the rounds, then medians and maxima."""
    keys = [key for key in {key: None for one in rounds for key in one} if not isinstance(rounds[0].get(key), dict)]
    lines = ["  ".join(f"{key:>18}" for key in keys)]
    lines += ["  ".join(f"{text(one.get(key)):>18}" for key in keys) for one in rounds]
    found = summary(rounds)
    for what in ("median", "max"):
        cells = [text(found[key][what]) if key in found else what if key == "rank" else "" for key in keys]
        lines.append("  ".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def text(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)


def table(folder: Path) -> str:
    """The table, with the rows for which there is a result."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    labels = [label for label in COLUMNS if any(name.startswith(f"{label}-") for name in found)]
    lines = ["| | " + " | ".join(COLUMNS[label] for label in labels) + " |", "|---" * (len(labels) + 1) + "|"]
    for title, fault, plan, cell in ROWS:
        results = [found.get(f"{label}-{fault}-{plan}") for label in labels]
        if any(results):
            cells = [cell(result) if result else "–" for result in results]
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bounds(folder: Path) -> str:
    """What bounds each goodput: a line for each library that was measured."""
    lines = []
    for label, title in COLUMNS.items():
        path = folder / f"{label}-goodput-ddp.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        one = result["rounds"][0]
        during, calm = one["during"], one["before"]
        usual = calm["step_seconds"][str(result["ranks"])]
        sizes = [
            f"{value / usual:.2f} times as long with {size} ranks" for size, value in during["step_seconds"].items()
        ]
        again = one["repeated"] / max(1, one["steps"] + one["repeated"])
        lines.append(
            f"- {title}: no step ended for {one['stalled']:.1%} of the time (without faults: "
            f"{calm['stalled'] / calm['seconds']:.1%}), {again:.1%} of the steps were repeated ones, and the median "
            f"step took {', '.join(sizes)} (as {usual * 1e3:.0f} ms without faults)."
        )
    return "\n".join(lines)


def main() -> None:
    """Replace the table in the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "measured")
    options = parser.parse_args()
    readme = HERE / "README.md"
    before, rest = readme.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    made = f"{table(options.results)}\n\n{bounds(options.results)}".strip()
    readme.write_text(f"{before}{MARKS[0]}\n\n{made}\n\n{MARKS[1]}{after}")
    print(made)


if __name__ == "__main__":
    main()
