"""Zero bubble with two stages on every rank, which go to the last rank and back, so that they form a V."""

from __future__ import annotations

from horizonml.plan.schedules.actions import Action, Lanes, schedule
from horizonml.plan.schedules.timetable import timetable


@schedule(
    "zb-v",
    "ZB-V (Zero Bubble Pipeline Parallelism, section 6; Qi et al., ICLR 2024): every rank holds two stages, the first "
    "rank also the last one, and weights' gradients fill the bubbles.",
    stages_per_rank=2,
    returns=True,
)
def zb_v(lane: int, lanes: Lanes, micro_batches: int) -> list[Action]:
    """Return the actions of a lane.

    A rank is idle as long as with the interleaved schedule. But where the pipeline turns, nothing travels; and because
    the stages of a rank are equally far from the loss together, all ranks hold about as many activations.
    """
    return list(timetable(lanes, micro_batches, split=True)[lane])
