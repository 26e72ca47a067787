"""Predicted against measured steps where all ranks share one machine, by plans of every kind.

    python -m benchmarks.contention --ranks 5 --models resnet18:32 mobilenet_v3_small:64

Strategy auto measures the machine first; the other plans are then judged by the problem that it has written down, with
and without the slow-down by other ranks that compute on the machine. Every plan is trained in turn, round by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.hetero import shape_of, sweep_plans
from horizonml.cli.tables import print_table
from horizonml.files import write_atomically
from horizonml.job.jobfile import changed, plan_values
from horizonml.job.schema import Job
from horizonml.plan.plan import Plan
from horizonml.planner.evaluator import Evaluator
from horizonml.planner.problem import Problem
from horizonml.planner.record import read_planning
from horizonml.report.records import load_run
from horizonml.text import human_seconds

_WARM_UP = 3  # steps that pay for connections and caches
_SECONDS = 240  # for a run


@dataclass
class Row:
    """What was predicted and measured of one plan."""

    model: str
    name: str
    plan: Plan
    predicted: float
    alone: float  # predicted as if ranks did not slow one another down
    times: list[float]

    @property
    def seconds(self) -> float:
        """Return the median of the measured steps."""
        return statistics.median(self.times)

    def to_json(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        return {**vars(self), "plan": self.plan.to_json(), "seconds": self.seconds}


def without_contention(problem: Problem) -> Problem:
    """Return the problem of a machine on which ranks slow one another down only by sharing its cores."""
    return replace(problem, hosts=[replace(host, contention=()) for host in problem.hosts])


class Machine:
    """Trains one model by several plans, with all ranks on this machine."""

    def __init__(self, model: str, ranks: int, batch: int, steps: int, out: Path) -> None:
        """`model` is a name and the size of its images, as in `resnet18:32`."""
        name, _, size = model.partition(":")
        self._model, self._out, self._steps = model, out, steps
        self._ranks = ranks
        self.job = Job.model_validate(
            {
                "name": "contention",
                "epochs": 1,
                "batch_size": batch,
                "model": {"name": name},
                "data": {"name": "synthetic", "image_size": int(size), "samples": batch * steps},
                "checkpoint": {"enabled": False},
                "telemetry": {"divergence_every": 0, "timeline_every": 5},
            }
        )
        self.train("measured", changed(self.job, {"parallel.strategy": "auto"}))
        planning = read_planning(self._folder("measured"))
        if planning is None or planning.problem is None:
            raise SystemExit("strategy auto has not written down what it measured")
        self.problem = planning.problem
        evaluator, alone = Evaluator(self.problem), Evaluator(without_contention(self.problem))
        plans = {"auto": planning.plan, **sweep_plans(self.problem)}
        self.rows = [
            Row(model, name, plan, *(one.judge(plan).prediction.seconds for one in (evaluator, alone)), [])
            for name, plan in plans.items()
        ]

    def round(self) -> None:
        """Train by each plan once."""
        for row in self.rows:
            values = {f"parallel.{key}": value for key, value in plan_values(row.plan).items()}
            times = self.train(row.name.replace(" ", "-"), changed(self.job, values))
            row.times += times
            print(
                f"{row.model} {row.name}: {human_seconds(statistics.median(times))} a step, predicted "
                f"{human_seconds(row.predicted)} ({human_seconds(row.alone)} without contention)",
                flush=True,
            )

    def train(self, name: str, job: Job) -> list[float]:
        """Return the walls of the steps of a training, without the first ones."""
        folder = self._folder(name)
        folder.parent.mkdir(parents=True, exist_ok=True)
        path = folder.parent / f"{name}.yaml"
        path.write_text(
            yaml.safe_dump(changed(job, {"folder": str(folder)}).model_dump(mode="json", exclude_none=True))
        )
        command = [sys.executable, "-m", "horizonml", "train", str(path), "--fresh", "-n", str(self._ranks)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if done.returncode:
            raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return [step.wall for step in load_run(name, folder).lead.steps[_WARM_UP:]]

    def _folder(self, name: str) -> Path:
        return self._out / self._model.replace(":", "-") / name


def show(rows: list[Row]) -> None:
    """Print a table, and what it comes to."""
    cells = [
        [
            row.model,
            row.name,
            human_seconds(row.seconds),
            human_seconds(row.predicted),
            f"{row.predicted / row.seconds - 1:+.0%}",
            human_seconds(row.alone),
            f"{row.alone / row.seconds - 1:+.0%}",
            shape_of(row.plan),
        ]
        for row in rows
    ]
    header = ["model", "plan", "a step", "predicted", "error", "without contention", "error", ""]
    print_table("ranks that share a machine", header, cells, text=(0, 1, 7))
    for what in ("predicted", "alone"):
        errors = [abs(getattr(row, what) / row.seconds - 1) for row in rows]
        words = "with" if what == "predicted" else "without"
        print(
            f"{words} contention, predictions are off by {statistics.median(errors):.0%} (median of {len(errors)}; "
            f"the worst by {max(errors):.0%})"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["resnet18:32", "mobilenet_v3_small:64"])
    parser.add_argument("--batch", type=int, default=160)
    parser.add_argument("--steps", type=int, default=15, help="of a run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/contention"), help="folder for records and results")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    machines = [Machine(model, arguments.ranks, arguments.batch, arguments.steps, out) for model in arguments.models]
    for _ in range(arguments.rounds):
        for machine in machines:
            machine.round()
    rows = [row for machine in machines for row in machine.rows]
    write_atomically(out / "contention.json", (json.dumps([row.to_json() for row in rows], indent=1) + "\n").encode())
    show(rows)


if __name__ == "__main__":
    main()
