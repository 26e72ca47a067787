"""Pipelines against torch's own and against data parallelism: `python -m benchmarks.pipeline`.

1. HorizonML with the plan that it chooses, against torch's 1F1B (with the cuts of that plan, and with cuts that balance
   the FLOPs), interleaved 1F1B and zero-bubble schedules (with cuts that balance the measured times), each with the
   number of micro-batches that suits it best, which a short sweep finds: ResNet-18, 5 ranks, global batch 320. All have
   kept memory; the long form has the same race without.
2. The same HorizonML against torch's schedules with equal block counts and 20 micro-batches, and the naive split.
3. HorizonML against torch's schedules and the naive split with the same cuts and micro-batches.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Race, Variant, main, pipeline_plan, variant
from benchmarks.tuned import balanced, best, layer_flops, layer_seconds, placed
from horizonml.plan.plan import Plan
from horizonml.planner.profile import Profile

RANKS, BATCH = 5, 320
LAYERS = 14  # of ResNet-18: stem (3), eight residual blocks, head (3)
EQUAL_BLOCKS = [4, 6, 8, 10]  # two blocks a stage, stem and head counted as one each
ALLOWED = range(2, 13)  # as cuts: not before the stem's ReLU, which works in place, and not after flatten, a view
STRAIGHT, AROUND = [*range(RANKS)], [*range(RANKS), *range(RANKS)]
THERE_AND_BACK = [*range(RANKS), *reversed(range(RANKS))]
JOB = """
batch_size: 320
model: {name: resnet18}
data: {name: synthetic, image_size: 32}
parallel: {strategy: pipeline, workers: 5, threads: 1}
"""


def chosen_plan() -> tuple[dict[str, Any], Profile]:
    """The plan that `horizonml plan` makes of the job here, and the profile that it has measured for it."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(JOB)
        command = [sys.executable, "-m", "horizonml", "plan", "--json", str(job)]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(result.stdout)
    return found["plan"], Profile.from_json(found["profile"])


def tuned_peers(plan: dict[str, Any], profile: Profile, counts: list[int]) -> list[Variant]:
    """torch's schedules, each with balanced cuts and the best of these numbers of micro-batches; memory is kept."""
    times, flops = layer_seconds(profile, BATCH // counts[0]), layer_flops("resnet18", (3, 32, 32))
    own = [stage["start"] for stage in plan["stages"][1:]]
    rows = [
        ("torch 1F1B, our cuts", "torch_1f1b", STRAIGHT, own),
        ("torch 1F1B, cuts by FLOPs", "torch_1f1b", STRAIGHT, balanced(flops, STRAIGHT, ALLOWED)),
        ("torch interleaved, cuts by time", "torch_interleaved", AROUND, balanced(times, AROUND, ALLOWED)),
        ("torch interleaved ZB, cuts by time", "torch_interleaved_zb", AROUND, balanced(times, AROUND, ALLOWED)),
        ("torch ZBV, cuts by time", "torch_zbv", THERE_AND_BACK, balanced(times, THERE_AND_BACK, ALLOWED)),
    ]
    found = []
    for name, peer, holders, cuts in rows:

        def make(count: int, peer: str = peer, holders: list[int] = holders, cuts: list[int] = cuts) -> Variant:
            shaped = placed(cuts, LAYERS, holders, count)
            return variant(f"{count} micro", peer, RANKS, BATCH, plan=shaped, keep_memory=True)

        count = best(f"micro-batches of {name} {cuts}", make, counts)
        found.append(variant(f"{name}, x{count}", **_arguments(make(count))))
    return found


def _arguments(one: Variant) -> dict[str, Any]:
    """Return what `variant` needs to make the same competitor under another name."""
    return {key: value for key, value in one.config.items() if key != "name"}


def tuned(plan: dict[str, Any], profile: Profile, short: bool) -> list[Race]:
    """HorizonML's own plan against the peers at their best, with kept memory, and unless `short` without."""
    peers = tuned_peers(plan, profile, [5, 10] if short else [5, 8, 10, 20])
    peers.append(variant("torch DDP, bucket views", "ddp", RANKS, BATCH, keep_memory=True,
                         ddp_options={"gradient_as_bucket_view": True, "static_graph": True}))  # fmt: skip
    found = []
    for kept in (True,) if short else (True, False):
        said = "memory kept" if kept else "no memory kept by peers"
        variants = [
            variant("HorizonML pipeline, its own plan", "horizonml", RANKS, BATCH, plan=plan),
            *(variant(one.name, **{**_arguments(one), "keep_memory": kept}) for one in peers),
        ]
        title = f"Pipelines at their best, {said}: ResNet-18 at 32 px, 5 ranks, global batch 320, 1 thread a rank"
        found.append(Race(title, f"tuned pipelines, {said}", peers[0].name, variants))
    return found


def equal_blocks(plan: dict[str, Any]) -> Race:
    """HorizonML's own plan against what one writes without a profile."""
    equal = pipeline_plan(EQUAL_BLOCKS, LAYERS, 20)
    variants = [
        variant("HorizonML pipeline, its own plan", "horizonml", RANKS, BATCH, plan=plan),
        variant("torch 1F1B, equal blocks, 20 micro", "torch_1f1b", RANKS, BATCH, plan=equal),
        variant("torch GPipe, equal blocks, 20 micro", "torch_gpipe", RANKS, BATCH, plan=equal),
        variant("naive sequential split, equal blocks", "sequential", RANKS, BATCH, plan=equal),
        variant("torch DDP", "ddp", RANKS, BATCH),
        variant("torch DDP, memory kept", "ddp", RANKS, BATCH, keep_memory=True),
    ]
    title = "Pipelines: ResNet-18 at 32 px, 5 ranks, global batch 320, 1 thread a rank"
    return Race(title, "pipelines, 5 ranks", "torch DDP", variants)


def same_cuts(short: bool) -> list[Race]:
    """The same cuts and micro-batches for all."""
    found = []
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


def races(short: bool) -> list[Race]:
    """Five ranks with the plan that is chosen here; and with the same cuts and micro-batches for all."""
    plan, profile = chosen_plan()
    print("HorizonML chose:")
    print(Plan.from_json(plan).describe())
    return [*tuned(plan, profile, short), equal_blocks(plan), *same_cuts(short)][: 2 if short else None]


if __name__ == "__main__":
    main(__doc__, races, rounds=8, steps=3, short="the race of the best, and that of equal blocks, with shorter sweeps")
