"""What local steps cost in quality: `python -m benchmarks.quality`.

Models are trained by one device, and by five with local steps, as the planner chooses them: their parameters are
averaged every 32 or 64 steps, in 4 bits. All see the same number of samples, for three seeds. What a small GPT learns
is judged by its perplexity on held-out text, and what ResNet-18 learns by its accuracy on held-out digits: at the end,
and by the number of steps until the mean of one device at three quarters of its training is reached. Links and devices
do not matter here, so all ranks run on this machine.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import machine
from horizonml.files import write_atomically
from horizonml.report.records import load_run
from horizonml.text import percent

MEASURED = Path(__file__).resolve().parent / "measured" / "quality.json"
WORKERS = 5
STEPS, EVERY = 1024, 64  # of a training, and between evaluations
ALONE = "one device alone"


def _local(every: int) -> dict[str, Any]:
    return {"strategy": "ddp", "workers": WORKERS, "threads": 1, "sync": {"every": every, "format": "int4"}}


WAYS: dict[str, dict[str, Any]] = {
    ALONE: {"strategy": "single", "workers": 1, "threads": 1},
    "five devices, means in int4 every 32 steps": _local(32),
    "five devices, means in int4 every 64 steps": _local(64),
}
_COMMON: dict[str, Any] = {
    "steps": STEPS,
    "lr_schedule": {"name": "cosine", "warmup_steps": 10},
    "evaluate": {"every_steps": EVERY},
    "checkpoint": {"enabled": False},
    "telemetry": {"timeline_every": 0, "divergence_every": 0},
}


@dataclass(frozen=True)
class Learned:
    """What is trained, and by which metric it is judged; a low or a high one is good."""

    job: dict[str, Any]
    metric: str
    is_error: bool

    def text(self, value: float) -> str:
        """Return a value of the metric for people."""
        return f"{value:.3f}" if self.is_error else percent(value, 2)

    def cost(self, value: float, base: float) -> str:
        """Return how a value compares with that of one device."""
        return f"{value / base - 1:+.1%}" if self.is_error else f"{100 * (value - base):+.2f} points"


MODELS = {
    "gpt": Learned(
        {
            **_COMMON,
            "batch_size": 16,
            "model": {"name": "gpt", "options": {"layers": 3, "heads": 6, "width": 192}},
            "data": {"name": "text", "tokens": "characters", "length": 64, "stride": 4, "holdout": 0.05},
            "optimizer": {"name": "adamw", "lr": 1e-3},
        },
        "perplexity",
        True,
    ),
    "resnet18": Learned(
        {
            **_COMMON,
            "batch_size": 64,
            "model": {"name": "resnet18"},
            "data": {"name": "digits"},
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
        },
        "accuracy",
        False,
    ),
}


def train(model: str, way: str, seed: int) -> dict[str, Any]:
    """Train once, and return the metric on held-out data after so many steps."""
    learned = MODELS[model]
    with tempfile.TemporaryDirectory(prefix="horizonml-quality-") as name:
        folder = Path(name)
        job = {**learned.job, "seed": seed, "folder": str(folder / "run"), "parallel": WAYS[way]}
        (folder / "job.yaml").write_text(json.dumps(job))
        command = [sys.executable, "-m", "horizonml", "train", str(folder / "job.yaml")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{model}, {way}, seed {seed}: {done.stderr}")
        evaluations = load_run("run", folder / "run").lead.evaluations
    found = {str(one.step): getattr(one, learned.metric) for one in evaluations}
    print(f"{model}, {way}, seed {seed}: {learned.text(found[str(STEPS)])}", flush=True)
    return {"model": model, "way": way, "seed": seed, "values": found}


def steps_to(run: dict[str, Any], target: float) -> int | None:
    """Return the steps after which a run was first found to be as good as the target."""
    is_error = MODELS[run["model"]].is_error
    good = (int(step) for step, found in run["values"].items() if (found <= target if is_error else found >= target))
    return next(good, None)


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the comparison in Markdown, of what has been measured so far."""
    return "\n\n".join(filter(None, (_table(name, [run for run in runs if run["model"] == name]) for name in MODELS)))


def _table(model: str, runs: Sequence[dict[str, Any]]) -> str:
    learned, own = MODELS[model], {way: made for way in WAYS if (made := [run for run in runs if run["way"] == way])}
    alone = own.get(ALONE)
    if alone is None:  # which the others are compared with, as long as trainings go on
        return ""
    base = statistics.mean(run["values"][str(STEPS)] for run in alone)
    target = statistics.mean(run["values"][str(3 * STEPS // 4)] for run in alone)
    title = f"{model}: {learned.metric} after {STEPS} steps"
    lines = [f"| {title} | | against one device | steps to {learned.text(target)} |", "|---|---|---|---|"]
    for way, made in own.items():
        last = [run["values"][str(STEPS)] for run in made]
        reached = [steps_to(run, target) for run in made]
        steps = [step for step in reached if step is not None]
        missed = f", not reached by {reached.count(None)} of {len(reached)}" if None in reached else ""
        mean = statistics.mean(last)
        lines.append(
            f"| {way} | {learned.text(mean)} ({learned.text(min(last))} to {learned.text(max(last))}) | "
            f"{learned.cost(mean, base)} | {f'{statistics.median(steps):.0f}' if steps else '–'}{missed} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Train in all ways, and print and keep what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--out", type=Path, default=MEASURED, help="the file of the results; others in it stay")
    options = parser.parse_args()
    before = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    runs: list[dict[str, Any]] = [run for run in before if run["model"] not in options.models]
    with ThreadPoolExecutor(options.jobs) as pool:
        seeds = range(options.seeds)
        wanted = [pool.submit(train, model, way, seed) for model in options.models for way in WAYS for seed in seeds]
        for future in as_completed(wanted):
            runs.append(future.result())
            write_atomically(options.out, (json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n").encode())
    print(table(runs))


if __name__ == "__main__":
    main()
