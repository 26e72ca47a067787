"""Training on five unequal devices with slow links, emulated with containers (examples/hetero).

- compare: ddp, an equal split of the layers, and the automatic plan, on links of 100 to 20 Mbit/s (`make hetero`). The
  job allows the automatic plan to be inexact (`exact: false`); the best exact plan is measured beside it.
- sweep: many plans at several link speeds, predicted and measured; the automatic plan against the best of them
- compression: what formats of links and sums bring at each speed, and the held-out accuracy on the digits

Needs Docker with Compose, the image (`make images`), and root or sudo, to shape links.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.emulated import ROOT, WORKERS, EmulatedCluster, Measured, base_job, with_plan
from horizonml.cli.tables import print_table
from horizonml.comm.group import Group
from horizonml.engine.sync.compressed import WHOLE_STEPS
from horizonml.files import write_atomically
from horizonml.job.jobfile import changed
from horizonml.job.schema import Job
from horizonml.plan.plan import Plan
from horizonml.planner.choose import best_plan
from horizonml.planner.devices import Cluster
from horizonml.planner.evaluator import Candidate, Evaluator, judge
from horizonml.planner.problem import Problem
from horizonml.planner.search import candidates, data_parallel, equal_split, fastest_alone
from horizonml.report.charts import draw_ranking, save
from horizonml.report.records import RecordedRun, load_run
from horizonml.report.run_plots import draw_timeline, legend, recorded_step
from horizonml.runtime.agreement import describe_problem, describe_together
from horizonml.telemetry.record import StepRecord
from horizonml.text import human_seconds

LINKS = ("100mbit", "100mbit", "50mbit", "50mbit", "20mbit")
_MEASURED_SECONDS = 40  # of steps, at least
_FEWEST = 4  # steps of a run; with --steps 4, of every run, whatever the automatic plan does between synchronisations
_MOST_EVERY = 64  # steps between synchronisations, if the automatic plan takes local steps
_FORMATS = ("fp32", "bf16", "int8", "int4")
_SUMS = ("none", "fp16", "int4", "powersgd")
_SEEDS = 3

Row = dict[str, Any]


def problem_on(cluster: Cluster, job: Job, folder: Path) -> Problem:
    """What the planner knows of a measured cluster; profiles lie in `folder`."""

    def base() -> Any:
        raise SystemExit("the measured cluster has a device without a profile")

    info, model = describe_together(job, Group(None, 0, 1, 60.0))
    profiles = cluster.profiles(base, model.chain.names, folder)
    return describe_problem(job, model, info, profiles, cluster.hosts(), cluster.network())


class Trial:
    """Runs at one setting of the links: the automatic plan first, which measures the devices and links."""

    def __init__(
        self, cluster: EmulatedCluster, out: Path, label: str, links: Sequence[str], job: Job, most: int
    ) -> None:
        """`links` are the workers' rates, or one for all; `most` is how many steps a run may take."""
        self._cluster, self._label, self.job, self._most = cluster, label, job, most
        self._times: dict[str, list[float]] = {}
        self.rows: dict[str, Row] = {}
        cluster.shape([*links, *[links[-1]] * WORKERS][:WORKERS])
        first = self.run("auto", automatic(job), None)
        folder = out / "runs" / f"{label}-auto"
        self.problem = problem_on(
            cluster.measured(f"{label}-auto"), changed(job, {"parallel.strategy": "auto"}), folder
        )
        self.auto = first.plan

    def run(self, name: str, job: Job, predicted: float | None, alone: int | None = None) -> Measured:
        """Train on all devices, or on one `alone`, and add what was measured to the row of this name."""
        whole = WHOLE_STEPS if job.parallel.gradient_compression == "powersgd" else 0
        steps = int(min(self._most, max(_FEWEST, _MEASURED_SECONDS / (predicted or 2))))
        if job.parallel.strategy == "auto" and not job.parallel.is_exact and self._most > _FEWEST:
            steps = max(steps, _MOST_EVERY + _FEWEST)
        print(f"{self._label} {name}: {steps} steps ...", flush=True)
        run = f"{self._label}-{name}".replace(",", "").replace(" ", "-")
        found = self._cluster.train(run, job, steps, 1200, whole, alone)
        times = self._times.setdefault(name, [])
        times.append(found.seconds)
        seconds = statistics.median(times)
        predicted = predicted or found.forecast
        self.rows[name] = {
            "links": self._label,
            "name": name,
            "plan": shape_of(found.plan),
            "seconds": seconds,
            "times": times,
            "samples_per_second": job.batch_size / seconds,
            "predicted": predicted,
            "error": None if predicted is None else predicted / seconds - 1,
            "bytes_sent": sum(bytes_of_a_step(rank.steps, found.plan) for rank in found.run.ranks),
            "plan_json": found.plan.to_json(),
            "worth": found.run.worth.words if found.run.worth is not None else None,
        }
        print(f"    {human_seconds(found.seconds)} a step, predicted {human_seconds(predicted or 0)}", flush=True)
        return found

    def run_plan(self, name: str, plan: Plan, **changes: Any) -> None:
        """Train by an explicit plan."""
        problem = self.problem
        job = with_plan(self.job, plan)
        if changes:
            job = changed(job, {f"parallel.{key}": value for key, value in changes.items()})
            info, model = describe_together(job, Group(None, 0, 1, 60.0))
            problem = describe_problem(job, model, info, problem.profiles, problem.hosts, problem.network)
        self.run(name, job, judge(problem, plan).prediction.seconds)


def automatic(job: Job, exact: bool = False) -> Job:
    """The job with an automatic plan."""
    return changed(job, {"parallel.strategy": "auto", "parallel.exact": exact})


def bytes_of_a_step(steps: Sequence[StepRecord], plan: Plan) -> float:
    """What a rank sends in a usual step; with local steps, in an average one."""
    if plan.local is None:
        return steps[-1].bytes_sent
    return statistics.mean(step.bytes_sent for step in steps[-plan.local.every :])


def shape_of(plan: Plan) -> str:
    """A plan in a few signs: layers and ranks of every stage, formats, micro-batches, local steps."""
    stages = []
    for number, stage in enumerate(plan.stages):
        active = [str(rank) for rank, share in zip(stage.ranks, stage.shares, strict=True) if share > 1e-6]
        send = f" -{stage.send}->" if number + 1 < len(plan.stages) else ""
        stages.append(f"{stage.stop - stage.start} on {'+'.join(active)}{send}")
    local = f", every {plan.local.every} {plan.local.format}" if plan.local is not None else ""
    return f"{' '.join(stages)}, x{plan.micro_batches}{local}"


def best_exact(problem: Problem) -> Plan:
    """What the planner chooses if plans must be exact."""
    return best_plan(replace(problem, constraints=problem.constraints.exactly())).plan


def best_equal_split(problem: Problem) -> Plan:
    """The same number of layers for everybody, with the number of micro-batches that suits it best."""
    splits = [plan for count in problem.micro_batches if (plan := equal_split(problem, count)) is not None]
    return min(splits, key=lambda plan: judge(problem, plan).cost)


def sweep_plans(problem: Problem) -> dict[str, Plan]:
    """Plans of every kind: simple ones, and the best that are predicted for each number of stages."""
    plans = {
        "ddp": data_parallel(problem),
        "equal split": best_equal_split(problem),
    }
    evaluator = Evaluator(problem)
    found = sorted((evaluator.judge(plan) for plan in set(candidates(evaluator))), key=lambda one: one.cost)
    for stages in range(2, WORKERS + 1):
        plan = next((one.plan for one in found if len(one.plan.stages) == stages and one.prediction.fits), None)
        if plan is not None:
            plans[f"{stages} stages"] = plan
    return plans


def compare(out: Path, rounds: int, links: Sequence[str], most: int, job: Job) -> list[Row]:
    """The example: three ways of training on links of 100 to 20 Mbit/s."""
    with EmulatedCluster(out) as cluster:
        label = "mixed" if len(set(links)) > 1 else links[0]
        trial = Trial(cluster, out, label, links, job, most)
        ways = {
            "auto, exact": best_exact(trial.problem),
            "equal split": best_equal_split(trial.problem),
            "ddp": data_parallel(trial.problem),
        }
        alone = fastest_alone(trial.problem, Evaluator(trial.problem))
        _interleave(trial, ways, rounds, alone)
    run = load_run("auto", out / "runs" / f"{label}-auto")
    all_links = [*links, *[links[-1]] * WORKERS][:WORKERS]
    draw(list(trial.rows.values()), run, all_links, job, out / "compare.png")
    return list(trial.rows.values())


def sweep(out: Path, rounds: int, links: Sequence[str], most: int, job: Job) -> list[Row]:
    """Every kind of plan, at several speeds of all links."""
    rows: list[Row] = []
    with EmulatedCluster(out) as cluster:
        for label in dict.fromkeys(links):
            trial = Trial(cluster, out, label, [label] * WORKERS, job, most)
            _interleave(trial, sweep_plans(trial.problem), rounds)
            rows += trial.rows.values()
            _save(out / "sweep.json", rows)
    return rows


def compression(out: Path, rounds: int, links: Sequence[str], most: int, job: Job) -> list[Row]:
    """The best exact plan with each format on all links, and ddp with each way of summing."""
    rows: list[Row] = []
    with EmulatedCluster(out) as cluster:
        for label in dict.fromkeys(links):
            trial = Trial(cluster, out, f"c{label}", [label] * WORKERS, job, most)
            exact = best_exact(trial.problem)
            for _ in range(rounds):
                for send in _FORMATS:
                    stages = tuple(replace(stage, send=send) for stage in exact.stages)
                    trial.run_plan(f"links {send}", replace(exact, stages=stages))
                for kind in _SUMS:
                    ddp = data_parallel(trial.problem)
                    trial.run_plan(f"ddp sums {kind}", ddp, gradient_compression=kind)
            rows += trial.rows.values()
            _save(out / "compression.json", rows)
    accuracy = accuracies(out / "accuracy")
    for row in rows:
        row["accuracies"] = accuracy.get(row["name"])
    return rows


def accuracies(out: Path) -> dict[str, list[float]]:
    """Held-out accuracies on the digits, one for each seed: formats of links between three stages, of sums in ddp."""
    kinds = {f"links {send}": {"strategy": "pipeline", "activations": send} for send in _FORMATS}
    kinds |= {f"ddp sums {kind}": {"strategy": "ddp", "gradient_compression": kind} for kind in _SUMS}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for seed in range(_SEEDS):
        for name, parallel in kinds.items():
            folder = out / f"{name.replace(' ', '-')}-{seed}"
            settings = {"seed": seed, "folder": folder, "checkpoint.enabled": "false", "parallel.micro_batches": 4}
            if parallel["strategy"] == "ddp":
                del settings["parallel.micro_batches"]
            settings |= {f"parallel.{key}": value for key, value in parallel.items()}
            sets = [f"--set={key}={value}" for key, value in settings.items()]
            command = [sys.executable, "-m", "horizonml", "train", str(ROOT / "jobs" / "digits.yaml"), "-n", "3"]
            print(f"digits, {name}, seed {seed} ...", flush=True)
            subprocess.run([*command, "--fresh", *sets], check=True, capture_output=True, timeout=300)
            found[name].append(load_run(name, folder).lead.evaluations[-1].accuracy)
    return found


def _interleave(trial: Trial, plans: dict[str, Plan], rounds: int, alone: Candidate | None = None) -> None:
    """All plans in turn, the automatic one and the device that trains `alone` among them, round by round."""
    auto = automatic(trial.job)
    for round_ in range(rounds):
        if round_:
            trial.run("auto", auto, trial.rows["auto"]["predicted"])
        for name, plan in plans.items():
            trial.run_plan(name, plan)
        if alone is not None:
            (device,) = alone.plan.stages[0].ranks
            fields = {"strategy": "single", "workers": 1, "micro_batches": alone.plan.micro_batches}
            job = changed(trial.job, {f"parallel.{key}": value for key, value in fields.items()})
            trial.run(f"device {device} alone", job, alone.prediction.seconds, device)


def draw(rows: Sequence[Row], run: RecordedRun, links: Sequence[str], job: Job, path: Path) -> None:
    """Draw how long a step takes in each way, and a recorded step of the automatic plan's run."""
    number = recorded_step(run)
    if number is None:
        print(f"{run.name}: no picture, as no step was recorded by all ranks")
        return
    figure = Figure(figsize=(12, 6.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=(1, 2.4))
    times = {row["name"]: row["times"] for row in sorted(rows, key=lambda row: float(row["seconds"]))}
    title = f"Time of a step: {job.model.name}, {job.batch_size} samples, five unequal devices with slow links"
    draw_ranking(top, times, title=title, own="auto", text=_seconds)
    by_rank = {rank.run.rank: rank for rank in run.ranks}
    by_device = replace(run, ranks=[by_rank[rank] for rank in sorted(by_rank)])
    work = draw_timeline(bottom, by_device, number, device_labels(by_device, links))
    bottom.set_title("One step of auto, as measured; numbers are micro-batches")
    handles = legend(work)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    save(figure, path)


def device_labels(run: RecordedRun, links: Sequence[str]) -> list[str]:
    """What each device does and is, for those of a run in their order."""
    labels = []
    for rank in run.ranks:
        number = rank.run.rank
        own = [stage for stage in run.stages if number in stage.ranks]
        layers = ", ".join(f"{s.start} to {s.stop - 1}" if s.stop - s.start > 1 else f"{s.start}" for s in own)
        does = f"layers {layers}" if own else "left out"
        labels.append(f"device {number}: {does}\n{rank.run.cores:g} cores, {links[number].replace('mbit', ' Mbit/s')}")
    return labels


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"


def show(rows: Sequence[Row]) -> None:
    """Tables, one for each setting of the links, and what they come to."""
    for label in dict.fromkeys(row["links"] for row in rows):
        own = sorted((row for row in rows if row["links"] == label), key=lambda row: row["seconds"])
        by_name = {row["name"]: row for row in own}
        cells = [
            [
                row["name"],
                human_seconds(row["seconds"]),
                f"{row['samples_per_second']:.1f}",
                f"{row['bytes_sent'] / 1e6:.1f} MB",
                human_seconds(row["predicted"]) if row["predicted"] else "-",
                f"{row['error']:+.0%}" if row["error"] is not None else "-",
                f"{statistics.mean(row['accuracies']):.2%}" if row.get("accuracies") else "-",
                row["plan"],
            ]
            for row in own
        ]
        header = ["", "a step", "samples/s", "sent a step", "predicted", "error", "digits", "plan"]
        print_table(f"links: {label}", header, cells, text=(0, 7))
        print(f"With auto, {by_name['auto']['worth']}.")
        auto = by_name["auto"]["seconds"]
        for name in ("ddp", "equal split", "auto, exact"):
            if name in by_name:
                print(f"auto is {by_name[name]['seconds'] / auto:.2f} times as fast as {name}")
        others = [row["seconds"] for row in own if row["name"] != "auto"]
        print(f"auto has {min(others) / auto:.2f} of the speed of the best other plan")
        pairs = list(itertools.combinations([row for row in own if row["predicted"]], 2))
        right = sum((a["seconds"] - b["seconds"]) * (a["predicted"] - b["predicted"]) >= 0 for a, b in pairs)
        print(f"of {len(pairs)} pairs of plans, {right} are in the order that was predicted")
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    print(f"predictions are off by {statistics.median(errors):.0%} (median of {len(errors)} plans)")


def _save(path: Path, rows: Sequence[Row]) -> None:
    write_atomically(path, (json.dumps(rows, indent=2) + "\n").encode())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds: dict[str, tuple[Callable[[Path, int, Sequence[str], int, Job], list[Row]], Sequence[str]]] = {
        "compare": (compare, LINKS),
        "sweep": (sweep, ("100mbit", "20mbit")),
        "compression": (compression, ("100mbit", "50mbit", "20mbit")),
    }
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--rounds", type=int, default=1, help="how often to measure everything, in turns")
    parser.add_argument("--links", nargs="+", help="rates; of each worker for compare, else one after the other")
    parser.add_argument("--steps", type=int, default=22, help="how many to take at most in a run")
    parser.add_argument("--batch-size", type=int, help="samples of a step, if not those of examples/hetero/job.yaml")
    parser.add_argument("--out", type=Path, default=Path("runs/hetero"), help="folder for records and results")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    function, links = kinds[arguments.what]
    job = changed(base_job(), {"batch_size": arguments.batch_size} if arguments.batch_size else {})
    rows = function(arguments.out, arguments.rounds, arguments.links or links, arguments.steps, job)
    _save(arguments.out / f"{arguments.what}.json", rows)
    show(rows)


if __name__ == "__main__":
    main()
