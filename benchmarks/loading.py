"""How much of the decoding of a folder of JPEGs loading ahead hides: `python -m benchmarks.loading`.

The same job trains on the same pictures, which are made here, with `data.workers: 0` (each step decodes its own
samples) and with workers that decode ahead of the step. The time that steps spend getting their data is in their
records (`load`); what is hidden is the part of it that goes away. The first steps of a run do not count, as there is
nothing to hide their loading behind.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from PIL import Image

from benchmarks.harness import machine
from horizonml.telemetry.log import read_records
from horizonml.telemetry.record import StepRecord

CLASSES, HEIGHT, WIDTH = 4, 600, 800
WARMUP = 4  # steps of a run that do not count


@dataclass
class Case:
    """A way of loading, and what was measured of its steps, in seconds."""

    name: str
    settings: list[str]
    load: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


CASES = (
    Case("when a step needs them", ["data.workers=0"]),
    Case("ahead, threads", ["data.workers=auto"]),
    Case("ahead, processes", ["data.workers=auto", "data.worker_kind=processes"]),
)


def write_pictures(folder: Path, count: int) -> None:
    """Write pictures with as much detail as photos have: about 100 kB each."""
    generator = numpy.random.default_rng(0)
    for number in range(count):
        coarse = generator.integers(0, 255, (HEIGHT // 20, WIDTH // 20, 3), dtype=numpy.uint8)
        smooth = numpy.asarray(Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), numpy.int16)
        grain = generator.integers(-12, 13, smooth.shape)
        path = folder / str(number % CLASSES) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((smooth + grain).clip(0, 255).astype(numpy.uint8)).save(path, quality=85)


def train(case: Case, folder: Path, settings: argparse.Namespace) -> None:
    """Train for some steps, and add what was measured."""
    run, pictures = folder / "run", str(folder / "pictures")
    samples = settings.batch * (settings.steps + WARMUP)
    job: dict[str, Any] = {
        "folder": str(run), "epochs": 1, "batch_size": settings.batch, "model": {"name": settings.model},
        "data": {"name": "folder", "folder": pictures, "image_size": settings.size, "samples": samples},
        "optimizer": {"lr": 0.01}, "parallel": {"strategy": "single", "micro_batches": 2, "threads": settings.threads},
        "checkpoint": {"enabled": False},
    }  # fmt: skip
    (folder / "job.yaml").write_text(json.dumps(job))
    overrides = [part for setting in case.settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "horizonml", "train", str(folder / "job.yaml"), "--fresh", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    steps = [one for one in read_records(run / "rank-0.jsonl") if isinstance(one, StepRecord)][-settings.steps :]
    case.load += [one.load for one in steps]
    case.wall += [one.wall for one in steps]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="steps of a run that count")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=128, help="side of the pictures that the model gets")
    parser.add_argument("--threads", type=int, default=2, help="that compute; the other cores are free to decode")
    settings = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = settings.batch * (settings.steps + WARMUP)
        write_pictures(folder / "pictures", count + count // 3)
        for _ in range(settings.rounds):
            for case in CASES:
                train(case, folder, settings)
    plain = statistics.mean(CASES[0].load)
    print(f"{'samples are decoded':24} {'load per step':>14} {'step':>9} {'hidden':>8}")
    for case in CASES:
        load, wall = statistics.mean(case.load), statistics.median(case.wall)
        hidden = f"{1 - load / plain:.1%}" if case is not CASES[0] else ""
        print(f"{case.name:24} {load * 1e3:>11.1f} ms {wall * 1e3:>6.0f} ms {hidden:>8}", flush=True)


if __name__ == "__main__":
    main()
