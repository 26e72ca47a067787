"""Zero bubble with two stages on every rank, which go round the ranks twice."""

from __future__ import annotations

from horizonml.plan.schedules.actions import Action, Lanes, schedule
from horizonml.plan.schedules.timetable import timetable


@schedule(
    "zb-interleaved",
    "Interleaved zero bubble (after Qi et al., ICLR 2024): every rank holds two stages, one from each turn around the "
    "ranks, and weights' gradients fill the bubbles.",
    stages_per_rank=2,
)
def zb_interleaved(lane: int, lanes: Lanes, micro_batches: int) -> list[Action]:
    """Return the actions of a lane.

    With P ranks, M micro-batches, and three equal passes (forward, input part, weight part) of each of its two stages,
    a rank is idle for a fraction of at least `(P - 1) / (6 M + P - 1)` of the step: it waits for its first input only.
    Activations travel twice as often as with ZB-H1. A rank holds those of at most 3 P / 2 micro-batches.
    """
    return list(timetable(lanes, micro_batches, split=True)[lane])
