"""One device, as each layer runs fastest on it, against plain torch in float32: `python -m benchmarks.device`.

For each model there are four competitors, which take turns: a minimal training loop of plain torch, the same with the
memory that training frees kept by the process (as HorizonML keeps it), HorizonML as it chooses for float32, and
HorizonML with `precision: bf16`. Each has one process with one thread. The choice is made anew in each run of the
benchmark, by what a job would do, and is printed; what making it has taken is, too. Times are the processor's: one
thread that never waits takes as long by the clock where nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import Variant, machine
from benchmarks.peers import LR, RandomBatch, StepFunction, optimizer_for
from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.files import write_atomically
from horizonml.job.schema import Job
from horizonml.machine.host import keep_freed_memory, rss_bytes
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import Model, build, construct
from horizonml.plan.plan import Plan, Stage
from horizonml.profiling.execution import execution_here
from horizonml.state.spec import Sgd
from horizonml.state.train_state import TrainState
from horizonml.tasks.classification import Classification
from horizonml.tasks.language_model import LanguageModel
from horizonml.tasks.task import Batch, InputSpec, OutputSpec, Task

VOCABULARY, TOKENS = 256, 64

# The name of a model, the size of its images (0: tokens), and the samples of a batch.
MODELS = (
    ("mobilenet_v3_small", 96, 32),
    ("efficientnet_b0", 96, 16),
    ("resnet18", 32, 64),
    ("resnet18", 96, 32),
    ("resnet50", 64, 16),
    ("vit_b_16", 224, 4),
    ("convnext_tiny", 96, 8),
    ("digits_cnn", 8, 64),
    ("torchvision.models:mobilenet_v2", 96, 16),
    ("torchvision.models:regnet_y_400mf", 96, 16),
    ("torchvision.models:shufflenet_v2_x1_0", 96, 32),
    ("densenet121", 64, 16),
    ("vgg11_bn", 32, 64),
    ("torchvision.models:swin_t", 96, 8),
    ("gpt", 0, 16),
)
MOBILE = ("mobilenet", "efficientnet")
DENSE = ("resnet", "vit", "convnext")


class TokenBatch:
    """Random tokens, and the same again as targets."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.size = size
        self._tokens = torch.randint(0, VOCABULARY, (size, TOKENS), generator=generator)

    def inputs(self, start: int, stop: int) -> Tensor:
        return self._tokens[start:stop]

    def targets(self, start: int, stop: int) -> Tensor:
        return self._tokens[start:stop]


def described_model(config: dict[str, Any]) -> tuple[ModelSpec, InputSpec, Batch, Task, OutputSpec]:
    """The model of a configuration, what it takes, a batch of it, its task, and its outputs."""
    name, size, rows = config["model"], config["pixels"], config["batch_size"]
    options = {"num_classes": 10} if ":" in name else {}
    if not size:
        return (
            ModelSpec(name=name),
            InputSpec.of((TOKENS,), torch.int64),
            TokenBatch(rows),
            LanguageModel(TOKENS),
            OutputSpec(VOCABULARY),
        )
    channels = 1 if name == "digits_cnn" else 3
    spec = ModelSpec(name=name, options=options)
    return (
        spec,
        InputSpec.of((channels, size, size)),
        RandomBatch(rows, (channels, size, size)),
        Classification(),
        OutputSpec(10),
    )


def plain(config: dict[str, Any]) -> tuple[StepFunction, str]:
    """A minimal training loop on the same model."""
    spec, taken, batch, task, outputs = described_model(config)
    module: nn.Module = construct(spec, 0, outputs, taken).train()
    optimizer = optimizer_for(module)
    inputs, targets = batch.inputs(0, batch.size), batch.targets(0, batch.size)
    assert isinstance(inputs, Tensor)
    assert isinstance(targets, Tensor)

    def step() -> None:
        optimizer.zero_grad()
        result = module(inputs)
        if isinstance(task, LanguageModel):
            result, wanted = result.flatten(0, 1), targets.flatten()
        else:
            wanted = targets
        functional.cross_entropy(result, wanted).backward()
        optimizer.step()

    return step, ""


def horizonml(config: dict[str, Any]) -> tuple[StepFunction, str]:
    """HorizonML's engine, with layers that run as a job of this device would have them run."""
    spec, taken, batch, task, outputs = described_model(config)
    model: Model = build(spec, 0, outputs, taken)
    fields: dict[str, Any] = {"batch_size": batch.size, "precision": config["precision"], "model": spec.model_dump()}
    begin = time.perf_counter()
    execution = execution_here(Job.model_validate(fields), model, 1, 1 << 20, lambda text: None)
    taken_seconds = time.perf_counter() - begin
    plan = Plan((Stage(0, len(model.chain), (0,), (1.0,)),))
    group, execution = Group(None, 0, 1, 60.0), execution.among([execution])
    session = Session(plan, TrainState(model, Sgd()), group, task, batch.size, execution)

    def step() -> None:
        session.step(batch, LR)

    return step, f"all layers {execution.words} (chosen in {taken_seconds:.1f} s)"


def serve(config: dict[str, Any]) -> None:
    """One competitor: it says when it is ready, and then, for each line `N` on standard input, runs N steps."""
    idle = rss_bytes()
    torch.set_num_threads(1)
    if config["keep_memory"]:
        keep_freed_memory()
    step, note = (horizonml if config["peer"] == "horizonml" else plain)(config)
    print(json.dumps({"ready": note}), flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            begin = time.process_time()
            step()
            times.append(time.process_time() - begin)
        print(json.dumps({"times": times, "rss": rss_bytes(), "idle": idle}), flush=True)


@contextmanager
def started(variants: list[Variant], cache: str) -> Iterator[dict[str, str]]:
    """All competitors of a model, started one after the other; what each has to say, by name."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HORIZONML_CACHE": cache}
    notes = {}
    try:
        for one in variants:
            command = [sys.executable, "-m", "benchmarks.device", "--serve", json.dumps(one.config)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = subprocess.Popen(command, env=env, text=True, **pipes)
            one.processes.append(process)
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{one.name} ended with {process.wait()} before it was ready")
            notes[one.name] = json.loads(line)["ready"]
            process.send_signal(signal.SIGSTOP)
        yield notes
    finally:
        for one in variants:
            for process in one.processes:
                process.kill()
                process.wait()


def measure(name: str, pixels: int, rows: int, settings: argparse.Namespace, cache: str) -> dict[str, Any]:
    """The median seconds of a step of each competitor on a model."""
    common = {"model": name, "pixels": pixels, "batch_size": rows, "precision": "fp32"}
    variants = [
        Variant("torch", {**common, "peer": "torch", "keep_memory": False}),
        Variant("torch, kept memory", {**common, "peer": "torch", "keep_memory": True}),
        Variant("fp32", {**common, "peer": "horizonml", "keep_memory": True}),
        Variant("bf16", {**common, "peer": "horizonml", "keep_memory": True, "precision": "bf16"}),
    ]
    with started(variants, cache) as notes:
        for turn in range(settings.rounds + 1):
            for one in variants:
                one.run(settings.steps, keep=turn > 0)
    return {
        "model": name.rpartition(":")[2],
        "pixels": pixels,
        "batch_size": rows,
        "seconds": {one.name: one.median for one in variants},
        "times": {one.name: one.times for one in variants},
        "chosen": notes,
    }


def row(found: dict[str, Any]) -> str:
    """A line of the table: milliseconds of plain torch, and how many times as fast each of the others is."""
    seconds, title = (
        found["seconds"],
        f"{found['model']}, {found['pixels'] or TOKENS} {'px' if found['pixels'] else ''}",
    )
    base, kept = seconds["torch"], seconds["torch, kept memory"]
    ratios = [base / seconds["fp32"], kept / seconds["fp32"], base / seconds["bf16"], kept / seconds["bf16"]]
    return f"{title:28} {base * 1e3:7.0f} {kept * 1e3:7.0f}  " + "  ".join(f"{ratio:9.2f}x" for ratio in ratios)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names of models (default: all)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of each competitor in a round")
    parser.add_argument("--out", type=Path, help="file for what was measured, as JSON")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.serve:
        serve(json.loads(settings.serve))
        return
    print(machine())
    print(f"{'':28} {'plain torch, ms':>15}  {'fp32 against it':>22}  {'bf16 against it':>22}")
    print(f"{'':28} {'':>7} {'kept':>7}  " + "  ".join(f"{title:>10}" for title in ("plain", "kept") * 2), flush=True)
    results = []
    with tempfile.TemporaryDirectory() as cache:
        for name, pixels, rows in MODELS:
            if not settings.models or name.rpartition(":")[2] in settings.models:
                results.append(measure(name, pixels, rows, settings, cache))
                print(row(results[-1]), flush=True)
    print()
    for found in results:
        for kind in ("fp32", "bf16"):
            print(f"{found['model']}, {found['pixels']} px, {kind}: {found['chosen'][kind]}")
    if settings.out is not None:
        write_atomically(settings.out, json.dumps({"machine": machine(), "models": results}, indent=1).encode())


if __name__ == "__main__":
    main()
