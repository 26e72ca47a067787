"""What a step spends on anything but the training itself: `python -m benchmarks.overheads`, a part of the footprint.

- loading: the time for which a step could not go on without its samples, as the records of a run have it (`load`)
- conversion: the time to bring a batch into the memory format and precision in which the first layer may run
- recording: the time in which a step is written to the records, and counted in the metrics

Each is given as a share of the median step of a job on one device with one thread; the goal is 2% for all together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import MEASURED, machine
from benchmarks.loading import CLASSES, write_pictures
from benchmarks.peers import LR, RandomBatch
from benchmarks.recorded import described
from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.files import write_atomically
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.plan.plan import Plan, Stage
from horizonml.state.spec import Sgd
from horizonml.state.train_state import TrainState
from horizonml.tasks.classification import Classification
from horizonml.tasks.task import InputSpec
from horizonml.telemetry.log import read_records
from horizonml.telemetry.metrics import Metrics
from horizonml.telemetry.record import StepRecord
from horizonml.telemetry.recorder import Display, Recorder

WARMUP = 6  # steps of a run that do not count


@dataclass(frozen=True)
class Case:
    """A job, in whose steps the shares are measured."""

    title: str
    model: str
    batch: int
    shape: tuple[int, int, int]
    data: dict[str, Any]
    steps: int
    threads: int = 1


CASES = (
    Case("the digits' network, 8 px", "digits_cnn", 64, (1, 8, 8), {"name": "digits"}, 200),
    Case("ResNet-18, 32 px", "resnet18", 64, (3, 32, 32), {"name": "synthetic", "image_size": 32}, 40),
    Case(
        "MobileNetV3-small, 96 px", "mobilenet_v3_small", 64, (3, 96, 96), {"name": "synthetic", "image_size": 96}, 40
    ),
    Case("ResNet-18, 128 px, JPEGs", "resnet18", 32, (3, 128, 128), {"name": "folder", "image_size": 128}, 24, 2),
)


def train(case: Case, folder: Path) -> tuple[float, float]:
    """Return the median seconds of a step, and the mean seconds of it that loading takes."""
    data = dict(case.data)
    if data["name"] == "folder":
        write_pictures(folder / "pictures", case.batch * 8 + CLASSES)
        data["folder"] = str(folder / "pictures")
    job = {
        "folder": str(folder / "run"), "steps": case.steps + WARMUP, "batch_size": case.batch,
        "model": {"name": case.model}, "data": data, "optimizer": {"lr": 0.001},
        "parallel": {"strategy": "single", "threads": case.threads}, "checkpoint": {"enabled": False},
        "evaluate": {"every_steps": case.steps + WARMUP},
    }  # fmt: skip
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    command = [sys.executable, "-m", "horizonml", "train", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    steps = [one for one in read_records(folder / "run" / "rank-0.jsonl") if isinstance(one, StepRecord)][-case.steps :]
    return statistics.median(one.wall for one in steps), statistics.mean(one.load for one in steps)


def conversion(case: Case) -> float:
    """Return the median seconds to convert a batch to channels_last and bfloat16, the most that there can be."""
    batch = torch.randn(case.batch, *case.shape)
    return timed(lambda: batch.to(torch.bfloat16, memory_format=torch.channels_last))


def recording(folder: Path) -> float:
    """Return the mean seconds that writing a step's record, with a timeline every 50 steps, and its metrics take."""
    model = build(ModelSpec(name="digits_cnn"), 0, 10, InputSpec.of((1, 8, 8)))
    plan = Plan((Stage(0, len(model.chain), (0,), (1.0,)),))
    session = Session(plan, TrainState(model, Sgd()), Group(None, 0, 1, 60.0), Classification(), 64)
    step = session.step(RandomBatch(64, (1, 8, 8)), LR)
    recorder = Recorder(folder / "recorded.jsonl", Display(), described(plan), 50, Metrics(0))
    count = 1000
    began = time.perf_counter()
    for number in range(1, count + 1):
        recorder.step(step, number, 1, 64, LR)
    seconds = (time.perf_counter() - began) / count
    recorder.close("done")
    return seconds


def timed(function: Callable[[], object], count: int = 50) -> float:
    """Return the median seconds of a call."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure() -> list[dict[str, Any]]:
    """Return the seconds of a step and its parts for each case."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for number, case in enumerate(CASES):
            folder = Path(name) / str(number)
            folder.mkdir()
            step, load = train(case, folder)
            parts = {"loading": load, "conversion": conversion(case), "recording": recording(folder)}
            rows.append({"title": f"{case.title}, batch {case.batch}", "step": step, **parts})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the shares as a table of the README."""
    parts = ("loading", "conversion", "recording")
    lines = ["| | step | loading | conversion | recording | together |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = [f"{row[part] * 1e3:.2f} ms" for part in parts]
        total = sum(row[part] for part in parts) / row["step"]
        lines.append(f"| {row['title']} | {row['step'] * 1e3:.1f} ms | {' | '.join(cells)} | {total:.1%} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, and keep the numbers for `python -m benchmarks.tables`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/measured/overheads.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    rows = measure()
    print(table(rows))
    if options.save:
        content = json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n"
        write_atomically(MEASURED / "overheads.json", content.encode())


if __name__ == "__main__":
    main()
