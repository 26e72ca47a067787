"""Data parallelism against torch's DDP and Horovod: `python -m benchmarks.ddp`."""

from __future__ import annotations

from importlib.util import find_spec

from benchmarks.harness import Race, ddp_plan, main, variant

LAYERS = 14  # of ResNet-18


def races(short: bool) -> list[Race]:
    """Two ranks, and, unless `short`, five."""
    found = []
    for world_size, batch_size in ((2, 128), (5, 320))[: 1 if short else 2]:
        variants = [
            variant("HorizonML ddp", "horizonml", world_size, batch_size, plan=ddp_plan(world_size, LAYERS)),
            variant("torch DDP", "ddp", world_size, batch_size),
            variant("torch DDP, memory kept", "ddp", world_size, batch_size, keep_memory=True),
        ]
        if find_spec("horovod"):
            variants.append(variant("Horovod", "horovod", world_size, batch_size))
        else:
            print("Horovod is left out: it is not installed (`make horovod` builds it)")
        title = f"Data parallelism: ResNet-18 at 32 px, {world_size} ranks, global batch {batch_size}, 1 thread a rank"
        found.append(Race(title, f"data parallel, {world_size} ranks", "torch DDP", variants))
    return found


if __name__ == "__main__":
    main(__doc__, races, rounds=8, steps=4, short="two ranks only")
