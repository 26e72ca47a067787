"""Interleaved 1F1B."""

from __future__ import annotations

from horizonml.plan.schedules.actions import Action, Kind, Lanes, schedule
from horizonml.plan.schedules.timetable import timetable


@schedule(
    "interleaved",
    "Interleaved 1F1B (Narayanan et al., SC 2021): every rank holds several stages, one from each turn around the "
    "ranks.",
    stages_per_rank=2,
)
def interleaved(lane: int, lanes: Lanes, micro_batches: int) -> list[Action]:
    """Return the actions of a lane.

    Because stages are shorter, the pipeline fills and drains sooner: with V stages per rank, each of P ranks is idle
    for a fraction `(P - 1) / (V M + P - 1)` of the step. Activations travel V times as often. Megatron-LM's order
    applies where the stages go round the ranks and the number of micro-batches is a multiple of the number of ranks; in
    other cases, a timetable finds an order.
    """
    ranks, turns = len(lanes), len(lanes[0])
    around = tuple(tuple(range(first, ranks * turns, ranks)) for first in range(ranks))
    if lanes != around or micro_batches % ranks:
        return list(timetable(lanes, micro_batches)[lane])
    rounds = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    held = lanes[lane]
    forward = [Action(Kind.FORWARD, stage, micro) for micros in rounds for stage in held for micro in micros]
    backward = [Action(Kind.BACKWARD, stage, micro) for micros in rounds for stage in held[::-1] for micro in micros]
    ahead = min(len(forward), 2 * (ranks - lane - 1) + (turns - 1) * ranks)
    actions = forward[:ahead]
    for number, action in enumerate(forward[ahead:]):
        actions += [action, backward[number]]
    return actions + backward[len(forward) - ahead :]
