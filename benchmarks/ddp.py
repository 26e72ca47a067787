"""Data parallelism against a minimal training loop on torch's DDP: `python -m benchmarks.ddp`."""

from __future__ import annotations

import argparse

from benchmarks.harness import ddp_plan, machine, race, table, variant

LAYERS = 14  # of ResNet-18


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    print(machine())
    for world_size, batch_size in ((2, 128), (5, 320)):
        variants = [
            variant("HorizonML ddp", "horizonml", world_size, batch_size, plan=ddp_plan(world_size, LAYERS)),
            variant("torch DDP", "ddp", world_size, batch_size),
            variant("torch DDP, memory kept", "ddp", world_size, batch_size, keep_memory=True),
        ]
        race(variants, arguments.rounds, arguments.steps)
        print(f"\nResNet-18 at 32 px, {world_size} ranks, global batch {batch_size}, 1 thread a rank")
        print(table(variants, "torch DDP"))


if __name__ == "__main__":
    main()
