"""Training on links that carry almost nothing: `python -m benchmarks.slow_links`.

Four ranks in networks of their own train to the end of a job with links that have no limit, for three seeds, which
tells the held-out accuracy after so many steps and the bytes per sample on the cables; and for some seconds with links
of 20 and 5 Mbit/s, which tells how long a step takes there. The time to the target is the product: waiting for ddp at
5 Mbit/s would take hours. Where the seconds suffice for the whole training, the time is not a product but measured.

- accuracy: the runs without a limit; they may run while the machine does other work, two at a time (`--jobs 2`)
- time: the runs on slow links, one at a time
- all: both, which is the default

Every result is written at once, and a run that has one is not repeated (`--again` repeats those that are chosen). Peers
of other libraries need `--python`, an interpreter that has them; without it they are left out. Linux, as root or where
users may create namespaces. `python -m benchmarks.tables` makes the README's tables of the results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.chaos.network import NoNetworks
from benchmarks.harness import machine
from benchmarks.slow_links_run import STOP, Failed, Wanted, run
from benchmarks.slow_links_ways import TASKS, WAYS, Way
from horizonml.files import write_atomically

MEASURED = Path(__file__).resolve().parent / "measured" / "slow-links.json"
SHORT = {"tasks": ["digits"], "ways": ["torch-ddp", "ddp", "powersgd", "local-int4"], "rates": [5.0]}


class Results:
    """What was measured, by task, way, seed and rate; written to a file after every run."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        found = json.loads(path.read_text()) if path.exists() else {}
        self.runs: dict[str, Any] = found.get("runs", {})

    @staticmethod
    def key(wanted: Wanted) -> str:
        return f"{wanted.task}/{wanted.way.name}/{wanted.seed}/{wanted.rate:g}"

    def lacks(self, wanted: Wanted) -> bool:
        """Whether a run is still to be made."""
        found = self.runs.get(self.key(wanted))
        return found is None or "failed" in found

    def put(self, wanted: Wanted, result: dict[str, Any]) -> None:
        with self._lock:
            self.runs[self.key(wanted)] = result
            content = {"machine": machine(), "runs": dict(sorted(self.runs.items()))}
            write_atomically(self._path, (json.dumps(content, indent=1) + "\n").encode())


def accuracy_runs(tasks: list[str], ways: list[Way], seeds: int, rates: list[float]) -> list[Wanted]:
    """Whole trainings on links without a limit; on slow links, if these decide how a way trains."""
    found = []
    for seed, task, way in itertools.product(range(seeds), tasks, ways):
        if not way.planned:
            found.append(Wanted(task, way, seed, 0.0))
        elif seed and way.like is None:  # seed 0 is timed below, to its end
            found += [Wanted(task, way, seed, rate) for rate in rates]
    return found


def timed_runs(tasks: list[str], ways: list[Way], rates: list[float], seconds: float) -> list[Wanted]:
    """Trainings on slow links, which end after some seconds."""
    return [
        Wanted(
            task,
            way,
            0,
            rate,
            None if way.planned and way.like is None else seconds,
            way.skip(task) + max(4, way.cycle(task)),
        )
        for task in tasks
        for rate in rates
        for way in ways
        if way.ranks > 1 or rate == rates[0]
    ]


def usable(ways: list[Way], python: str) -> list[Way]:
    """The ways whose packages are there; the others are said to be left out."""
    packages = {way.package for way in ways if way.package is not None}
    missing = set()
    for package in sorted(packages):
        found = python and subprocess.run([python, "-c", f"import {package}"], capture_output=True, check=False)
        if not found or found.returncode:
            missing.add(package)
            where = f"{python} does not have it" if python else "name an interpreter that has it with --python"
            print(f"{package} is left out: {where}")
    return [way for way in ways if way.package not in missing]


def make(wanted: Wanted, results: Results, python: str, scratch: Path) -> None:
    """Make a run and keep its result."""
    began = time.monotonic()
    try:
        result = run(wanted, scratch / results.key(wanted).replace("/", "-"), python)
    except Failed as error:
        result = {"failed": str(error)}
    if STOP.is_set():
        return  # half of a run
    results.put(wanted, result)
    took = f"{time.monotonic() - began:.0f} s"
    if "failed" in result:
        print(f"{results.key(wanted)}: failed after {took}: {result['failed']}", flush=True)
        return
    last = list(result["accuracies"].values())[-1:]
    print(
        f"{results.key(wanted)}: {result['steps']} steps, {result['step_seconds'] * 1e3:.1f} ms a step, "
        f"{result['bytes_per_sample']:.0f} bytes a sample{f', {last[0]:.2%}' if last else ''} ({took})",
        flush=True,
    )


def main() -> None:
    """Make the runs that are still to be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("all", "accuracy", "time"), default="all")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", nargs="+", type=float, default=[20.0, 5.0], help="of the links, in Mbit/s")
    parser.add_argument("--seconds", type=float, default=12.0, help="of training in a run on slow links")
    parser.add_argument("--jobs", type=int, default=1, help="runs for the accuracy at a time")
    parser.add_argument("--python", default="", help="an interpreter that has torchft and hivemind")
    parser.add_argument("--again", action="store_true", help="repeat runs that have a result")
    parser.add_argument("--short", action="store_true", help="the digits, 5 Mbit/s, one seed and four ways")
    parser.add_argument("--out", type=Path, default=MEASURED, help="the file of the results")
    options = parser.parse_args()
    if options.short:
        options.seeds = 1
        vars(options).update(SHORT)
    print(machine())
    ways, results = usable([WAYS[name] for name in options.ways], options.python), Results(options.out)
    accuracies = accuracy_runs(options.tasks, ways, options.seeds, options.rates) if options.part != "time" else []
    timed = timed_runs(options.tasks, ways, options.rates, options.seconds) if options.part != "accuracy" else []
    try:
        with tempfile.TemporaryDirectory(prefix="horizonml-slow-") as name:
            for todo, jobs in ((accuracies, options.jobs), (timed, 1)):
                wanted = [one for one in todo if options.again or results.lacks(one)]
                with ThreadPoolExecutor(jobs) as pool:
                    try:
                        list(pool.map(lambda one: make(one, results, options.python, Path(name)), wanted))
                    finally:
                        STOP.set()
                STOP.clear()
    except NoNetworks as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends everything, as Ctrl-C does
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
