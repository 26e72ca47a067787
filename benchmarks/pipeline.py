"""Pipelines against torch's own and against data parallelism: `python -m benchmarks.pipeline`.

1. HorizonML with the cuts and micro-batches it chooses, against torch's 1F1B and GPipe with equal block counts and 20
   micro-batches, the naive sequential split, and plain DDP: ResNet-18, 5 ranks, global batch 320.
2. HorizonML against torch's schedules and the naive split with the same cuts and micro-batches.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Race, main, pipeline_plan, variant
from horizonml.plan.plan import Plan

LAYERS = 14  # of ResNet-18: stem (3), eight residual blocks, head (3)
EQUAL_BLOCKS = [4, 6, 8, 10]  # two blocks a stage, stem and head counted as one each
JOB = """
batch_size: 320
model: {name: resnet18}
data: {name: synthetic, image_size: 32}
parallel: {strategy: pipeline, workers: 5}
"""


def chosen_plan() -> dict[str, object]:
    """The plan that `horizonml plan` makes of the job here."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(JOB)
        command = [sys.executable, "-m", "horizonml", "plan", "--json", str(job)]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
    plan: dict[str, object] = json.loads(result.stdout)["plan"]
    return plan


def races(short: bool) -> list[Race]:
    """Five ranks with the plan that is chosen here; and with the same cuts and micro-batches for all."""
    plan = chosen_plan()
    print("HorizonML chose:")
    print(Plan.from_json(plan).describe())
    equal = pipeline_plan(EQUAL_BLOCKS, LAYERS, 20)
    variants = [
        variant("HorizonML pipeline, its own plan", "horizonml", 5, 320, plan=plan),
        variant("torch 1F1B, equal blocks, 20 micro", "torch_1f1b", 5, 320, plan=equal),
        variant("torch GPipe, equal blocks, 20 micro", "torch_gpipe", 5, 320, plan=equal),
        variant("naive sequential split, equal blocks", "sequential", 5, 320, plan=equal),
        variant("torch DDP", "ddp", 5, 320),
        variant("torch DDP, memory kept", "ddp", 5, 320, keep_memory=True),
    ]
    title = "Pipelines: ResNet-18 at 32 px, 5 ranks, global batch 320, 1 thread a rank"
    found = [Race(title, "pipelines, 5 ranks", "torch DDP", variants)]
    same = (
        ("5 ranks, 5 micro-batches", 5, [3, 5, 7, 9], 5, 320),
        ("2 ranks, 8 micro-batches", 2, [6], 8, 256),
        ("5 ranks, 20 micro-batches", 5, EQUAL_BLOCKS, 20, 320),
    )
    for name, world_size, cuts, micro_batches, batch_size in same[: 1 if short else 3]:
        shared = pipeline_plan(cuts, LAYERS, micro_batches)
        variants = [
            variant("HorizonML 1f1b", "horizonml", world_size, batch_size, plan=shared),
            variant("torch Schedule1F1B", "torch_1f1b", world_size, batch_size, plan=shared),
            variant("torch ScheduleGPipe", "torch_gpipe", world_size, batch_size, plan=shared),
            variant("naive sequential split", "sequential", world_size, batch_size, plan=shared),
            variant("torch 1F1B, memory kept", "torch_1f1b", world_size, batch_size, plan=shared, keep_memory=True),
        ]
        title = f"The same cuts {cuts} for all: {name}, global batch {batch_size}"
        found.append(Race(title, f"same cuts, {name}", "torch Schedule1F1B", variants))
    return found


if __name__ == "__main__":
    main(__doc__, races, rounds=8, steps=3, short="five ranks with 5 micro-batches only")
