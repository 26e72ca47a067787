"""A device that becomes slow in the middle of a run, and fast again: with new plans, and without.

    python -m benchmarks.throttle                 # nobody says why: the others measure it
    python -m benchmarks.throttle --sensor        # the device's sensors say that it is too hot

Ranks of strategy auto train on this machine. The one with the most to do is stopped for a part of every fiftieth of a
second, as a clock that is held back would, and goes on undisturbed later. The table has the samples per second
before, while and after that; a line for each run says after how many seconds there was another plan.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.chaos.cluster import Cluster
from horizonml.cli.tables import print_table

JOB = """
name: throttle
epochs: 100000
batch_size: {batch}
model: {{name: {model}}}
data: {{name: digits, image_size: 32, channels: 3, holdout: 0.02}}
optimizer: {{name: sgd, lr: 0.001}}
lr_schedule: {{name: constant}}
evaluate: {{every_epochs: 1000}}
checkpoint: {{every_steps: 100000}}
parallel: {{strategy: auto, threads: 1, replan: {replan}}}
telemetry: {{timeline_every: 0}}
"""
_PERIOD = 0.02  # seconds of a duty cycle
_START_SECONDS = 120.0
_SETTLED = 5.0  # seconds after a change that do not count
_NOMINAL = 2_400_000  # kHz


class Slowed(threading.Thread):
    """Stops a process for a part of every fiftieth of a second."""

    def __init__(self, pid: int, part: float) -> None:
        """Begin; `part` is the one in which the process stands."""
        super().__init__(daemon=True)
        self._pid, self._part, self._over = pid, part, threading.Event()
        self.start()

    def run(self) -> None:
        """Stop the process and let it go on, until `end`."""
        while not self._over.is_set():
            os.kill(self._pid, signal.SIGSTOP)
            time.sleep(_PERIOD * self._part)
            os.kill(self._pid, signal.SIGCONT)
            time.sleep(_PERIOD * (1 - self._part))

    def end(self) -> None:
        """Let the process go on undisturbed."""
        self._over.set()
        self.join()


class Sensors:
    """Pretends to be the kernel's folder of sensors."""

    def __init__(self, folder: Path) -> None:
        """Begin cool, at full speed."""
        self._zone = folder / "class" / "thermal" / "thermal_zone0"
        self._policy = folder / "devices" / "system" / "cpu" / "cpufreq" / "policy0"
        for one in (self._zone, self._policy):
            one.mkdir(parents=True)
        (self._zone / "type").write_text("cpu-thermal\n")
        (self._zone / "trip_point_0_type").write_text("passive\n")
        (self._zone / "trip_point_0_temp").write_text("85000\n")
        (self._policy / "cpuinfo_max_freq").write_text(f"{_NOMINAL}\n")
        self.set(50.0, 1.0)

    def set(self, degrees: float, clock: float) -> None:
        """Show a temperature, and the part of its clock at which the processor may run."""
        (self._zone / "temp").write_text(f"{degrees * 1000:.0f}\n")
        (self._policy / "scaling_max_freq").write_text(f"{_NOMINAL * clock:.0f}\n")


class _Ranks(Cluster):
    """The ranks of a job, each with sensors of its own."""

    def _launch(self, command: list[str], log: Path, env: Mapping[str, str], **extra: Any) -> subprocess.Popen[bytes]:
        own = {"HORIZONML_SYSFS": str(self.folder / f"sys-{env['RANK']}")} if "RANK" in env else {}
        return super()._launch(command, log, {**env, **own}, **extra)


def measure(
    folder: Path, ranks: int, job: str, part: float, seconds: tuple[float, float, float], sensor: bool
) -> dict[str, Any]:
    """Return what a run did before, while and after a rank was slow, each for so many seconds."""
    folder.mkdir(parents=True)
    path = folder / "job.yaml"
    path.write_text(job)
    sensors = [Sensors(folder / f"sys-{rank}") for rank in range(ranks)]
    with _Ranks(path, ranks, folder) as cluster:
        _wait_for_steps(cluster, 5)
        time.sleep(seconds[0])
        plan = [line for line in cluster.records(0) if line["kind"] == "run"][-1]["plan"]
        busiest = max(range(ranks), key=lambda rank: _layers(plan, rank))
        slow_at = time.time()
        if sensor:
            sensors[busiest].set(92.0, 1 - part)
        slowed = Slowed(cluster.process(busiest).pid, part)
        time.sleep(seconds[1])
        slowed.end()
        sensors[busiest].set(60.0, 1.0)
        free_at = time.time()
        time.sleep(seconds[2])
        end_at = time.time()
        said = cluster.log(0).read_text(errors="replace")
    lines = cluster.records(0)
    spans = {
        "before": (slow_at - seconds[0] + _SETTLED, slow_at),
        "at first": (slow_at, slow_at + _SETTLED),
        "while slow": (free_at - seconds[1] / 2, free_at),
        "free again": (end_at - seconds[2] / 2, end_at),
    }
    plans = [line for line in lines if line["kind"] == "run"]
    return {
        "rank": busiest,
        "rates": {name: _rate(lines, *span) for name, span in spans.items()},
        "plans": [round(line["time"] - slow_at, 1) for line in plans[1:]],
        "freed": free_at - slow_at,
        "layers": [[round(_layers(line["plan"], rank), 2) for rank in range(ranks)] for line in plans],
        "said": [line for line in said.splitlines() if "as long as planned" in line or "too hot" in line],
    }


def _rate(lines: list[dict[str, Any]], begin: float, end: float) -> float:
    """Return the samples per second between two times."""
    return sum(line["batch"] for line in lines if line["kind"] == "step" and begin <= line["time"] < end) / (
        end - begin
    )


def _layers(plan: Mapping[str, Any], rank: int) -> float:
    """Return the layers that a rank computes, those of a stage with several members by its share."""
    found = 0.0
    for stage in plan["stages"]:
        if rank in stage["ranks"]:
            share = stage["shares"][stage["ranks"].index(rank)] / sum(stage["shares"])
            found += (stage["stop"] - stage["start"]) * share
    return found


def _wait_for_steps(cluster: Cluster, steps: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while sum(line["kind"] == "step" for line in cluster.records(0)) < steps:
        if time.monotonic() > deadline or cluster.exit_code(0) is not None:
            raise SystemExit(f"no {steps} steps within {_START_SECONDS:.0f} s:\n{cluster.log(0).read_text()[-2000:]}")
        time.sleep(0.2)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--part", type=float, default=0.6, help="of the time in which the slow rank stands")
    parser.add_argument("--seconds", type=float, nargs=3, default=(15.0, 30.0, 30.0), help="before, slow, and after")
    parser.add_argument("--sensor", action="store_true", help="let the device's sensors tell")
    parser.add_argument("--rounds", type=int, default=1, help="of runs with and without new plans, in turn")
    parser.add_argument("--out", type=Path, default=Path("runs/throttle"), help="a new folder for the runs")
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"--out: {arguments.out} exists; delete it, or name another folder")
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for number in range(arguments.rounds):
        for replan in (True, False):
            job = JOB.format(batch=arguments.batch, model=arguments.model, replan=str(replan).lower())
            folder = arguments.out / f"{'with' if replan else 'without'}-{number}"
            one = measure(folder, arguments.ranks, job, arguments.part, tuple(arguments.seconds), arguments.sensor)
            found[replan].append(one)
            print(
                f"{folder.name}: rank {one['rank']} slow; new plans after {one['plans']} s (free after "
                f"{one['freed']:.1f} s); layers by rank: {one['layers']}",
                *one["said"],
                sep="\n    ",
                flush=True,
            )
    names = list(found[True][0]["rates"])
    rates = {
        replan: {name: statistics.median(run["rates"][name] for run in runs) for name in names}
        for replan, runs in found.items()
    }
    rows = [
        [words, *(f"{rates[replan][name]:.0f}" for name in names)]
        for replan, words in ((True, "with new plans"), (False, "without"))
    ]
    rows.append(["ratio", *(f"{rates[True][name] / max(1e-9, rates[False][name]):.2f}" for name in names)])
    print_table("samples per second", ["", *names], rows)


if __name__ == "__main__":
    main()
