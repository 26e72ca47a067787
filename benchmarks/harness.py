"""Runs variants side by side in one go: their ranks all live at once, and take turns.

Rounds are interleaved (A B C A B C ...), so that a machine whose speed drifts drifts for all; medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from horizonml.files import write_atomically
from horizonml.machine.host import available_cores, processor_name
from horizonml.plan.plan import Plan, Stage

MEASURED = Path(__file__).resolve().parent / "measured"


@dataclass
class Variant:
    """One competitor, and what was measured of it."""

    name: str
    config: dict[str, Any]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    idle: int = 0

    @property
    def median(self) -> float:
        """Median step time in seconds (of the slowest rank, step by step)."""
        return statistics.median(self.times)

    @property
    def speed(self) -> float:
        """Samples per second."""
        return float(self.config["batch_size"] / self.median)

    def run(self, steps: int, keep: bool) -> None:
        """Take some steps. Between its turns a competitor is stopped: some have threads that never rest."""
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = [json.loads(_line(process)) for process in self.processes]
        if keep:
            self.times += [max(times) for times in zip(*(answer["times"] for answer in answers), strict=True)]
        self.rss = [answer["rss"] for answer in answers]
        self.idle = answers[0]["idle"]
        for process in self.processes:
            process.send_signal(signal.SIGSTOP)


def variant(name: str, peer: str, world_size: int, batch_size: int, **config: Any) -> Variant:
    """A competitor on ResNet-18 at 32 pixels, one thread a rank, unless `config` says otherwise."""
    defaults: dict[str, Any] = {"model": "resnet18", "shape": [3, 32, 32], "threads": 1}
    defaults["keep_memory"] = peer == "horizonml"
    if peer == "horizonml":
        defaults["execution"] = "auto"  # layers as they run fastest here, as every job trains
    return Variant(
        name, {**defaults, "name": name, "peer": peer, "world_size": world_size, "batch_size": batch_size, **config}
    )


def pipeline_plan(cuts: list[int], layers: int, micro_batches: int, schedule: str = "1f1b") -> dict[str, Any]:
    """A pipeline's plan as JSON; `cuts` are the first layers of stages 1 and up."""
    bounds = [0, *cuts, layers]
    stages = tuple(Stage(bounds[i], bounds[i + 1], (i,), (1.0,)) for i in range(len(bounds) - 1))
    return Plan(stages, schedule, micro_batches).to_json()


def ddp_plan(world_size: int, layers: int) -> dict[str, Any]:
    """One stage, all ranks, as JSON."""
    return Plan((Stage(0, layers, tuple(range(world_size)), (1.0,) * world_size),)).to_json()


@contextmanager
def started(variants: list[Variant]) -> Iterator[list[Variant]]:
    """All ranks of all variants, ready to step; ended on the way out."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    try:
        for one in variants:
            text = json.dumps({**one.config, "port": store.port})
            for rank in range(one.config["world_size"]):
                one.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "benchmarks.peers", text],
                        env={**env, "RANK": str(rank)},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
            for process in one.processes:
                _line(process)
            for process in one.processes:
                process.send_signal(signal.SIGSTOP)
        yield variants
    finally:
        for one in variants:
            for process in one.processes:
                process.kill()
                process.wait()


def race(variants: list[Variant], rounds: int, steps: int) -> list[Variant]:
    """Interleave `rounds` of `steps` steps of each variant, after one round that does not count."""
    with started(variants):
        for round_ in range(rounds + 1):
            for one in variants:
                one.run(steps, keep=round_ > 0)
    return variants


def table(variants: list[Variant], reference: str) -> str:
    """Step times and speeds, as ratios to one of the variants."""
    base = next(one for one in variants if one.name == reference)
    lines = [f"{'':34} {'median step':>12} {'min':>10} {'max':>10} {'samples/s':>10} {'ratio':>7} {'max RSS':>9}"]
    for one in variants:
        lines.append(
            f"{one.name:34} {one.median * 1e3:>9.1f} ms "
            f"{min(one.times) * 1e3:>7.1f} ms {max(one.times) * 1e3:>7.1f} ms "
            f"{one.speed:>10.0f} {base.median / one.median:>6.2f}x {max(one.rss) / 2**20:>6.0f} MB"
        )
    return "\n".join(lines)


@dataclass
class Race:
    """What is raced, and against which of the variants ratios are given."""

    title: str
    short: str
    reference: str
    variants: list[Variant]

    def run(self, rounds: int, steps: int) -> None:
        """Race, and print the table."""
        race(self.variants, rounds, steps)
        print(f"\n{self.title}")
        print(table(self.variants, self.reference), flush=True)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        rows = [
            {
                "name": one.name,
                "seconds": one.median,
                "times": one.times,
                "samples_per_second": one.speed,
                "batch_size": one.config["batch_size"],
                "rss_bytes": max(one.rss),
            }
            for one in self.variants
        ]
        return {"title": self.title, "short": self.short, "reference": self.reference, "rows": rows}


def main(doc: str | None, races: Callable[[bool], Iterable[Race]], rounds: int, steps: int, short: str) -> None:
    """The command line of some races; `short` says what `--short` leaves.

    With `--out`, `peers.json` is written there, for `horizonml report`; earlier races of it are kept. With `--save`,
    it is benchmarks/measured/peers.json, of which `python -m benchmarks.tables` makes the README's tables.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--short", action="store_true", help=short)
    parser.add_argument("--out", type=Path, help="folder for peers.json, which `horizonml report` shows")
    parser.add_argument("--save", dest="out", action="store_const", const=MEASURED, help="as --out benchmarks/measured")
    arguments = parser.parse_args()
    print(machine())
    for one in races(arguments.short):
        one.run(arguments.rounds, arguments.steps)
        if arguments.out is not None:
            keep(one, arguments.out / "peers.json")


def keep(race: Race, path: Path) -> None:
    """Add a race to a file, in the place of an earlier one of the same kind."""
    before = json.loads(path.read_text())["races"] if path.exists() else []
    kept = [one for one in before if one["short"] != race.short]
    content = json.dumps({"machine": machine(), "races": [*kept, race.to_json()]}, indent=2)
    write_atomically(path, content.encode())


def machine() -> str:
    """What this was measured on."""
    import torch

    software = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{processor_name()}, {available_cores():g} usable; {software}"


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a rank ended with code {process.wait()}; see its message above")
    return line
