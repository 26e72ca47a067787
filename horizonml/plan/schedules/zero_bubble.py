"""ZB-H1 (Zero Bubble Pipeline Parallelism; Qi et al., ICLR 2024): weights' gradients fill the bubbles.

The order is that of 1F1B, with each backward pass split in two. The previous stage waits for the input part only; stage
s runs the weight part of a micro-batch s micro-batches later, or when it has nothing else to do. With P equal stages, M
micro-batches and three equal passes (forward, input part, weight part), each stage is idle for a fraction
`(P - 1) / (3 M + P - 1)` of the step, about a third of 1F1B's. Every stage holds as many activations as 1F1B's first
stage: those of at most P micro-batches.
"""

from __future__ import annotations

from horizonml.plan.actions import Action, Kind, Lanes
from horizonml.plan.schedules import one_f_one_b

NAME = "zb-h1"
STAGES_PER_RANK = 1


def passes(lane: int, lanes: Lanes, micro_batches: int) -> list[Action]:
    """Return the actions of a lane."""
    actions: list[Action] = []
    waiting: dict[int, list[Action]] = {stage: [] for stage in lanes[lane]}  # weight parts that are still to run
    for action in one_f_one_b.passes(lane, lanes, micro_batches):
        if action.kind is Kind.FORWARD:
            actions.append(action)
            continue
        actions.append(Action(Kind.BACKWARD_INPUT, action.stage, action.micro))
        waiting[action.stage].append(Action(Kind.BACKWARD_WEIGHT, action.stage, action.micro))
        if len(waiting[action.stage]) > action.stage:
            actions.append(waiting[action.stage].pop(0))
    return actions + [left for stage in lanes[lane] for left in waiting[stage]]
