"""How near 1F1B comes to its bubble limit: `python -m benchmarks.bubble`.

With P equal stages and M micro-batches a schedule can be busy for M / (M + P - 1) of a step. Five ranks on two cores
cannot show that with real work, so here the layers sleep instead of computing: they take time but no processor, and
everything else (messages of real size, schedule, agreement, update) is real.
"""

from __future__ import annotations

import argparse

from benchmarks.harness import machine, pipeline_plan, race, variant

MICRO_ROWS = 16
SECONDS_PER_SAMPLE = 0.5e-3  # forward; backward takes twice as long


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    print(machine())
    print(f"{'':12} {'':>14} {'bubble limit':>13} {'busy':>7} {'busy / limit':>13}")
    for ranks, micro_batches in ((2, 8), (5, 5), (5, 20)):
        plan = pipeline_plan(list(range(1, ranks)), ranks + 2, micro_batches)  # the head adds two layers
        settings = {
            "model": "benchmarks.peers:sleeping_model",
            "options": {"layers": ranks, "seconds": SECONDS_PER_SAMPLE},
            "shape": [32, 16, 16],  # 32 KiB a sample: 512 KiB a micro-batch
            "plan": plan,
        }
        batch = MICRO_ROWS * micro_batches
        variants = [
            variant("HorizonML", "horizonml", ranks, batch, **settings),
            variant("torch", "torch_1f1b", ranks, batch, **settings),
        ]
        race(variants, arguments.rounds, arguments.steps)
        limit = micro_batches / (micro_batches + ranks - 1)
        for one in variants:
            busy = 3 * SECONDS_PER_SAMPLE * batch / one.median
            print(
                f"{one.name:12} {f'P={ranks} M={micro_batches}':>14} {limit:>12.1%} {busy:>7.1%} {busy / limit:>13.1%}"
            )


if __name__ == "__main__":
    main()
