"""What it costs beside the training itself: `python -m benchmarks.footprint`.

1. Start-up of the command line.
2. Memory of the ranks of a pipeline, beside a process that has only imported torch.
3. Recording: steps with and without it, interleaved.
4. Metrics: steps with them and a scrape every second, and without, interleaved.
5. Loading, conversion and recording as shares of a step: `python -m benchmarks.overheads`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.harness import machine, pipeline_plan, started, variant
from benchmarks.overheads import measure, table
from benchmarks.peers import LR, RandomBatch
from benchmarks.recorded import described
from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.machine.host import keep_freed_memory
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import Model, build
from horizonml.plan.plan import Plan, Stage
from horizonml.state.spec import Sgd
from horizonml.state.train_state import TrainState
from horizonml.tasks.classification import Classification
from horizonml.tasks.task import InputSpec
from horizonml.telemetry.http import MetricsServer
from horizonml.telemetry.metrics import Metrics
from horizonml.telemetry.recorder import Display, Recorder

CUTS, LAYERS, MICRO_BATCHES, BATCH = [4, 7, 9, 10], 14, 5, 320  # ResNet-18 in five stages


def help_seconds() -> list[float]:
    """Wall times of `horizonml --help`."""
    times = []
    for _ in range(11):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "horizonml", "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return times[1:]


def memory() -> None:
    """Resident memory and parameters of each rank of a five-stage ResNet-18."""
    plan = pipeline_plan(CUTS, LAYERS, MICRO_BATCHES)
    model = build(ModelSpec(name="resnet18"), 0, 10, InputSpec.of((3, 32, 32)))
    sizes = [parameter_bytes(model, stage.start, stage.stop) for stage in Plan.from_json(plan).stages]
    one = variant("HorizonML pipeline", "horizonml", 5, BATCH, plan=plan)
    with started([one]):
        one.run(4, keep=True)
    print(f"import torch alone: {one.idle / 2**20:.0f} MB; whole model: {sum(sizes) / 2**20:.1f} MB of parameters")
    for rank, (rss, size) in enumerate(zip(one.rss, sizes, strict=True)):
        held = 3 * size / 2**20
        print(
            f"rank {rank}: {rss / 2**20:.0f} MB resident, {(rss - one.idle) / 2**20:.0f} MB above import torch; "
            f"{size / 2**20:.1f} MB of parameters ({held:.1f} MB with gradients and momentum)"
        )


def parameter_bytes(model: Model, start: int, stop: int) -> int:
    """Bytes of the parameters of some layers."""
    return sum(parameter.nbytes for parameter in model.chain.slice(start, stop).parameters())


def recording(name: str, shape: tuple[int, ...], batch_size: int, rounds: int, steps: int) -> None:
    """Steps with and without recording, interleaved in one process."""
    model = build(ModelSpec(name=name), 0, 10, InputSpec.of(shape))
    plan = Plan((Stage(0, len(model.chain), (0,), (1.0,)),))
    session = Session(plan, TrainState(model, Sgd()), Group(None, 0, 1, 60.0), Classification(), batch_size)
    batch = RandomBatch(batch_size, shape)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "rank-0.jsonl", Display(), described(plan), 50)
        count = 0

        def with_records() -> None:
            nonlocal count
            count += 1
            recorder.step(session.step(batch, LR), count, 1, batch_size, LR)

        def without() -> None:
            session.step(batch, LR)

        times: dict[str, list[float]] = {"with": [], "without": []}
        for round_ in range(rounds + 1):
            for key, function in (("with", with_records), ("without", without)):
                seconds = timed(function, steps)
                if round_:
                    times[key].append(seconds)
        recorder.close("done")
    ratio = statistics.median(a / b for a, b in zip(times["with"], times["without"], strict=True))
    print(
        f"{name}, batch {batch_size}: {statistics.median(times['without']) * 1e3:.2f} ms a step without records, "
        f"{statistics.median(times['with']) * 1e3:.2f} ms with; median ratio {ratio:.4f}"
    )


SCRAPER = """
import sys, time, threading, urllib.request
on = threading.Event()
def scrape():
    while True:
        on.wait()
        urllib.request.urlopen(sys.argv[1], timeout=5).read()
        time.sleep(1)
threading.Thread(target=scrape, daemon=True).start()
for line in sys.stdin:
    on.set() if line.strip() == "on" else on.clear()
"""


def scraping(name: str, shape: tuple[int, ...], batch_size: int, rounds: int, seconds: float) -> None:
    """Recorded steps with metrics that another process scrapes every second, and without, interleaved."""
    model = build(ModelSpec(name=name), 0, 10, InputSpec.of(shape))
    plan = Plan((Stage(0, len(model.chain), (0,), (1.0,)),))
    session = Session(plan, TrainState(model, Sgd()), Group(None, 0, 1, 60.0), Classification(), batch_size)
    batch, metrics = RandomBatch(batch_size, shape), Metrics(0)
    server = MetricsServer(metrics.registry, ("127.0.0.1", 0), lambda: None)
    scraper = subprocess.Popen(
        [sys.executable, "-c", SCRAPER, f"http://127.0.0.1:{server.port}/metrics"], stdin=subprocess.PIPE, text=True
    )
    assert scraper.stdin is not None
    times: dict[str, list[float]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory() as folder:
        recorders = {
            "on": Recorder(Path(folder) / "on.jsonl", Display(), described(plan), 50, metrics),
            "off": Recorder(Path(folder) / "off.jsonl", Display(), described(plan), 50),
        }
        for round_ in range(rounds + 1):
            for key, recorder in recorders.items():
                print(key, file=scraper.stdin, flush=True)
                start, count = time.perf_counter(), 0
                while time.perf_counter() - start < seconds:
                    count += 1
                    recorder.step(session.step(batch, LR), count, 1, batch_size, LR)
                if round_:
                    times[key].append((time.perf_counter() - start) / count)
        for recorder in recorders.values():
            recorder.close("done")
    scraper.kill()
    scraper.wait()
    server.close()
    ratio = statistics.median(a / b for a, b in zip(times["on"], times["off"], strict=True))
    print(
        f"{name}, batch {batch_size}: {statistics.median(times['off']) * 1e3:.2f} ms a step without metrics, "
        f"{statistics.median(times['on']) * 1e3:.2f} ms with metrics and scrapes; median ratio {ratio:.4f}"
    )


def timed(function: Callable[[], None], count: int) -> float:
    """Mean seconds of a call."""
    start = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - start) / count


def main() -> None:
    """Print everything."""
    torch.set_num_threads(1)
    keep_freed_memory()
    print(machine())
    times = help_seconds()
    print(f"\nhorizonml --help: median {statistics.median(times):.3f} s, max {max(times):.3f} s")
    print("\nResNet-18 at 32 px as a pipeline of 5 ranks, batch 320 in 5 micro-batches, momentum SGD")
    memory()
    print("\nrecording every step (JSON lines, a timeline every 50 steps)")
    recording("resnet18", (3, 32, 32), 64, 12, 4)
    recording("digits_cnn", (1, 8, 8), 64, 30, 40)
    print("\nPrometheus metrics, scraped every second")
    scraping("resnet18", (3, 32, 32), 64, 12, 3.0)
    scraping("digits_cnn", (1, 8, 8), 64, 12, 3.0)
    print("\nloading, conversion and recording within a step")
    print(table(measure()))


if __name__ == "__main__":
    main()
