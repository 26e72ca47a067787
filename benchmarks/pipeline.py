"""Pipelines against torch's own and against data parallelism: `python -m benchmarks.pipeline`.

1. HorizonML with the cuts and micro-batches it chooses, against torch's 1F1B with equal block counts and 20
   micro-batches, and plain DDP: ResNet-18, 5 ranks, global batch 320.
2. HorizonML against torch's Schedule1F1B with the same cuts and micro-batches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import machine, pipeline_plan, race, table, variant
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


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    print(machine())
    plan = chosen_plan()
    equal = pipeline_plan(EQUAL_BLOCKS, LAYERS, 20)
    print("\nResNet-18 at 32 px, 5 ranks, global batch 320, 1 thread a rank; HorizonML chose:")
    print(Plan.from_json(plan).describe())
    variants = [
        variant("HorizonML pipeline, its own plan", "horizonml", 5, 320, plan=plan),
        variant("torch 1F1B, equal blocks, 20 micro", "torch_1f1b", 5, 320, plan=equal),
        variant("torch DDP", "ddp", 5, 320),
        variant("torch DDP, memory kept", "ddp", 5, 320, keep_memory=True),
    ]
    race(variants, arguments.rounds, arguments.steps)
    print(table(variants, "torch DDP"))
    for name, world_size, cuts, micro_batches, batch_size in (
        ("2 ranks, 8 micro-batches", 2, [6], 8, 256),
        ("5 ranks, 20 micro-batches", 5, EQUAL_BLOCKS, 20, 320),
        ("5 ranks, 5 micro-batches", 5, [3, 5, 7, 9], 5, 320),
    ):
        same = pipeline_plan(cuts, LAYERS, micro_batches)
        variants = [
            variant("HorizonML 1f1b", "horizonml", world_size, batch_size, plan=same),
            variant("torch Schedule1F1B", "torch_1f1b", world_size, batch_size, plan=same),
            variant(
                "torch Schedule1F1B, memory kept", "torch_1f1b", world_size, batch_size, plan=same, keep_memory=True
            ),
        ]
        race(variants, arguments.rounds, arguments.steps)
        print(f"\nthe same cuts {cuts} and micro-batches: {name}, global batch {batch_size}")
        print(table(variants, "torch Schedule1F1B"))


if __name__ == "__main__":
    main()
