"""Unequal devices and slow links on one machine: the containers of examples/hetero, and training on them."""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import yaml

from horizonml.job.jobfile import changed, load, plan_values
from horizonml.job.schema import Job
from horizonml.plan.plan import Plan
from horizonml.planner.devices import Cluster, load_cluster
from horizonml.report.records import RecordedRun, load_run
from horizonml.security.token import TOKEN, make_token

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "hetero"
WORKERS = 5
_WARM_UP = 2  # steps that pay for connections and caches
_START_SECONDS = 240


@dataclass(frozen=True)
class Measured:
    """A run on the emulated cluster."""

    run: RecordedRun
    seconds: float  # of a step: the median, or with local steps the mean
    samples_per_second: float
    accuracy: float | None  # on held-out data
    plan: Plan
    forecast: float | None  # what the automatic plan predicted, in seconds

    @classmethod
    def of(cls, run: RecordedRun, unlike: int = 0) -> Measured:
        """From a run's records, of which the first steps are `unlike` the others."""
        steps = run.lead.steps[_WARM_UP + unlike :]
        plan = Plan.from_json(run.lead.run.plan.model_dump())
        if plan.local is None:
            seconds = statistics.median(step.wall for step in steps)
        else:  # few steps synchronise, and each counts
            whole = len(steps) // plan.local.every * plan.local.every
            seconds = statistics.mean(step.wall for step in steps[-whole:])
        evaluations = run.lead.evaluations
        accuracy = evaluations[-1].accuracy if evaluations else None
        return cls(run, seconds, steps[0].batch / seconds, accuracy, plan, run.lead.run.forecast)


class EmulatedCluster:
    """Five containers that train what they are told. Use it as a context: it ends them."""

    def __init__(self, out: Path, cores: Sequence[float] = (), memory: str | None = None) -> None:
        """Records and jobs go to `out`. The environment variable COMPOSE names another command for docker compose.

        `cores` are those of the devices, in place of the example's, and `memory` is what each of them has.
        """
        if memory is not None:
            os.environ["MEMORY"] = memory
        for worker, quota in enumerate(cores):
            os.environ[f"CPUS_{worker}"] = f"{quota:g}"
        self._out, self._jobs = out, out / "jobs"
        self._compose = [*shlex.split(os.environ.get("COMPOSE", "docker compose")), "-f", str(EXAMPLE / "compose.yaml")]

    def __enter__(self) -> EmulatedCluster:
        self._jobs.mkdir(parents=True, exist_ok=True)
        os.environ["HETERO_JOBS"] = str(self._jobs.absolute())
        os.environ[TOKEN] = make_token().text  # of this run alone
        self._run("down", "--volumes", "--timeout", "1")
        self._run("up", "--detach", "--wait")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._run("down", "--volumes", "--timeout", "1")

    def shape(self, rates: Sequence[str]) -> None:
        """Give each worker's link a rate, such as "20mbit", in both directions."""
        root = [] if os.geteuid() == 0 else ["sudo"]
        for worker, rate in enumerate(rates):
            container = self._run("ps", "--quiet", f"worker-{worker}").strip()
            _checked([*root, str(ROOT / "scripts" / "shape"), container, rate], 60)

    def train(
        self, name: str, job: Job, steps: int, timeout: float, unlike: int = 0, alone: int | None = None
    ) -> Measured:
        """Train for so many steps, after some that are `unlike` them, and read what the ranks recorded.

        All workers train, or one `alone`.
        """
        workers = range(WORKERS) if alone is None else range(alone, alone + 1)
        own = [] if alone is None else ["--env", "WORLD_SIZE=1", "--env", "RANK=0"]
        samples = (unlike + steps) * job.batch_size
        job = changed(job, {"name": name, "data.samples": samples} if job.data.samples is None else {"name": name})
        (self._jobs / f"{name}.yaml").write_text(yaml.safe_dump(job.model_dump(exclude_none=True)))
        command = ["horizonml", "train", f"/jobs/{name}.yaml", "--fresh", "-n", str(len(workers))]
        ranks = [
            subprocess.Popen(
                [*self._compose, "exec", "-T", *own, f"worker-{worker}", *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for worker in workers
        ]
        deadline = time.monotonic() + _START_SECONDS + timeout
        try:
            outputs = [rank.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{name}: not done within {_START_SECONDS + timeout:.0f} s") from None
        finally:
            for rank in ranks:
                rank.kill()
        for worker, rank, output in zip(workers, ranks, outputs, strict=True):
            if rank.returncode != 0:
                raise SystemExit(f"{name}: worker {worker} ended with {rank.returncode}:\n{output[-2000:]}")
        return Measured.of(load_run(name, self._fetch(name)), unlike)

    def measured(self, name: str) -> Cluster:
        """The devices and links as an automatic plan's run has measured them."""
        return load_cluster(self._out / "runs" / name / "cluster.yaml")

    def _fetch(self, name: str) -> Path:
        """Copy a run's records out of the containers."""
        folder = self._out / "runs" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._run("cp", f"worker-0:/data/runs/{name}", str(folder))
        return folder

    def _run(self, *arguments: str) -> str:
        return _checked([*self._compose, *arguments], 300)


def base_job() -> Job:
    """What is trained there."""
    return load(EXAMPLE / "job.yaml")


def with_plan(job: Job, plan: Plan) -> Job:
    """The job with this plan."""
    return changed(job, {**{f"parallel.{key}": value for key, value in plan_values(plan).items()}})


def _checked(command: Sequence[str], timeout: float) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr[-2000:]}")
    return result.stdout
