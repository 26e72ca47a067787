"""How near schedules come to their limits: `python -m benchmarks.bubble`.

With P equal ranks and M micro-batches, 1F1B can be busy for `M / (M + P - 1)` of a step, interleaved 1F1B with two
stages a rank for `2 M / (2 M + P - 1)`, ZB-H1 for `3 M / (3 M + P - 1)`, and zero bubble with two stages a rank for
`6 M / (6 M + P - 1)`. Five ranks on two cores cannot show that with real work, so here the layers sleep instead of
computing: they take time but no processor, and everything else (messages of real size, schedule, agreement, update) is
real.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.harness import Variant, machine, race, variant
from horizonml.plan.plan import Plan, Stage

MICRO_ROWS = 16
SECONDS_PER_SAMPLE = 2e-3  # of a rank, as a small device takes: forward, for the input's gradient, and for the weights'


def plan(holders: list[int], schedule: str, micro_batches: int) -> dict[str, Any]:
    """Return the plan in which stage s is held by rank `holders[s]`, as JSON; every rank has two sleeping layers."""
    layers = 2 * (max(holders) + 1)
    each = layers // len(holders)
    stages = [Stage(number * each, (number + 1) * each, (rank,), (1.0,)) for number, rank in enumerate(holders)]
    last = stages[-1]
    stages[-1] = Stage(last.start, last.stop + 2, last.ranks, last.shares)  # the head: two layers that take no time
    return Plan(tuple(stages), schedule, micro_batches).to_json()


def competitors(ranks: int, micro_batches: int) -> list[tuple[Variant, float]]:
    """Return what is raced, each with the part of a step for which its schedule can be busy."""
    straight, around = list(range(ranks)), [*range(ranks), *range(ranks)]
    there_and_back = [*range(ranks), *reversed(range(ranks))]

    def limit(passes: int) -> float:
        return passes * micro_batches / (passes * micro_batches + ranks - 1)

    shared = {
        "model": "benchmarks.sleeping:sleeping_model",
        "options": {"layers": 2 * ranks, "seconds": SECONDS_PER_SAMPLE / 2},
        "execution": "plain",
        "shape": [32, 16, 16],  # 32 KiB a sample: 512 KiB a micro-batch
    }
    rows = [
        ("HorizonML 1F1B", "horizonml", straight, "1f1b", limit(1)),
        ("torch 1F1B", "torch_1f1b", straight, "1f1b", limit(1)),
        ("HorizonML interleaved", "horizonml", around, "interleaved", limit(2)),
        ("torch interleaved", "torch_interleaved", around, "interleaved", limit(2)),
        ("HorizonML ZB-H1", "horizonml", straight, "zb-h1", limit(3)),
        ("HorizonML ZB interleaved", "horizonml", around, "zb-interleaved", limit(6)),
        ("torch interleaved ZB", "torch_interleaved_zb", around, "interleaved", limit(6)),
        ("HorizonML ZB-V", "horizonml", there_and_back, "zb-v", limit(6)),
        ("torch ZBV", "torch_zbv", there_and_back, "interleaved", limit(6)),
    ]
    batch = MICRO_ROWS * micro_batches
    return [
        (variant(name, peer, ranks, batch, plan=plan(holders, schedule, micro_batches), **shared), best)
        for name, peer, holders, schedule, best in rows
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    print(machine())
    print(f"{'':24} {'':>10} {'limit':>7} {'busy':>7} {'busy / limit':>13}")
    for ranks, micro_batches in ((2, 8), (5, 5), (5, 20)):
        raced = competitors(ranks, micro_batches)
        race([one for one, _ in raced], arguments.rounds, arguments.steps)
        for one, limit in raced:
            busy = 3 * SECONDS_PER_SAMPLE * MICRO_ROWS * micro_batches / one.median
            shape = f"P={ranks} M={micro_batches}"
            print(f"{one.name:24} {shape:>10} {limit:>7.1%} {busy:>7.1%} {busy / limit:>13.1%}", flush=True)


if __name__ == "__main__":
    main()
