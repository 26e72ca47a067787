"""What local steps cost a language model: `python -m benchmarks.perplexity`.

A small GPT is trained by one device, and by five with local steps, as the planner chooses them on slow links: their
parameters are averaged every 32 or 64 steps, in 4 bits. All see the same number of samples, for three seeds. The
perplexity on held-out text is compared at the end, and the number of steps until the mean perplexity of one device at
three quarters of its training is reached. Links and devices do not matter here, so all ranks run on this machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.harness import machine
from horizonml.files import write_atomically
from horizonml.report.records import load_run

MEASURED = Path(__file__).resolve().parent / "measured" / "perplexity.json"
WORKERS = 5
STEPS, EVERY = 1024, 64  # of a training, and between evaluations
JOB: dict[str, Any] = {
    "batch_size": 16,
    "steps": STEPS,
    "model": {"name": "gpt", "options": {"layers": 3, "heads": 6, "width": 192}},
    "data": {"name": "text", "tokens": "characters", "length": 64, "stride": 4, "holdout": 0.05},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "lr_schedule": {"name": "cosine", "warmup_steps": 10},
    "evaluate": {"every_steps": EVERY},
    "checkpoint": {"enabled": False},
    "telemetry": {"timeline_every": 0, "divergence_every": 0},
}


def _local(every: int) -> dict[str, Any]:
    return {"strategy": "ddp", "workers": WORKERS, "threads": 1, "sync": {"every": every, "format": "int4"}}


WAYS: dict[str, dict[str, Any]] = {
    "one device alone": {"strategy": "single", "workers": 1, "threads": 1},
    "five devices, means in int4 every 32 steps": _local(32),
    "five devices, means in int4 every 64 steps": _local(64),
}


def train(way: str, seed: int) -> dict[str, Any]:
    """Train once, and return the held-out perplexity after so many steps."""
    with tempfile.TemporaryDirectory(prefix="horizonml-perplexity-") as name:
        folder = Path(name)
        job = {**JOB, "seed": seed, "folder": str(folder / "run"), "parallel": WAYS[way]}
        (folder / "job.yaml").write_text(json.dumps(job))
        subprocess.run(
            [sys.executable, "-m", "horizonml", "train", str(folder / "job.yaml")], check=True, capture_output=True
        )
        evaluations = load_run("run", folder / "run").lead.evaluations
    found = {str(one.step): one.perplexity for one in evaluations}
    print(f"{way}, seed {seed}: {found[str(STEPS)]:.3f}", flush=True)
    return {"way": way, "seed": seed, "perplexities": found}


def steps_to(run: dict[str, Any], target: float) -> int | None:
    """Return the steps after which a run was first found to have a perplexity."""
    return next((int(step) for step, found in run["perplexities"].items() if found <= target), None)


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the comparison in Markdown, of what has been measured so far."""
    own = {way: made for way in WAYS if (made := [run for run in runs if run["way"] == way])}
    alone = own.get("one device alone")
    if alone is None:  # which the others are compared with, as long as trainings go on
        return ""
    base = statistics.mean(run["perplexities"][str(STEPS)] for run in alone)
    target = statistics.mean(run["perplexities"][str(3 * STEPS // 4)] for run in alone)
    lines = [f"| | perplexity after {STEPS} steps | against one device | steps to {target:.2f} |", "|---|---|---|---|"]
    for way, made in own.items():
        last = [run["perplexities"][str(STEPS)] for run in made]
        reached = [steps_to(run, target) for run in made]
        steps = [step for step in reached if step is not None]
        missed = f", not reached by {reached.count(None)} of {len(reached)}" if None in reached else ""
        mean = statistics.mean(last)
        lines.append(
            f"| {way} | {mean:.3f} ({min(last):.3f} to {max(last):.3f}) | {mean / base - 1:+.1%} | "
            f"{f'{statistics.median(steps):.0f}' if steps else '–'}{missed} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Train in all ways, and print and keep what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--out", type=Path, default=MEASURED, help="the file of the results")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        wanted = [pool.submit(train, way, seed) for seed in range(options.seeds) for way in WAYS]
        for future in as_completed(wanted):
            runs.append(future.result())
            write_atomically(options.out, (json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n").encode())
    print(table(runs))


if __name__ == "__main__":
    main()
