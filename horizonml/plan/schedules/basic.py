"""The schedules of pipelines in which every rank holds one stage: GPipe, 1F1B and ZB-H1."""

from __future__ import annotations

from horizonml.plan.schedules.actions import Action, Kind, Lanes, evaluation, schedule
from horizonml.plan.schedules.timetable import timetable


@schedule("gpipe", "GPipe (Huang et al., NeurIPS 2019): all forward passes, then all backward passes.")
def gpipe(lane: int, lanes: Lanes, micro_batches: int) -> list[Action]:
    """Return the actions of a lane; backward passes run from the last micro-batch to the first.

    With P equal stages and M micro-batches, each stage is idle for a fraction `(P - 1) / (M + P - 1)` of the step, and
    holds the activations of all M micro-batches.
    """
    forward = evaluation(lanes[lane], micro_batches, len(lanes))
    return forward + [Action(Kind.BACKWARD, action.stage, action.micro) for action in reversed(forward)]


@schedule("1f1b", "1F1B (PipeDream-Flush; Narayanan et al., ICML 2021): one backward pass after each forward pass.")
def one_f_one_b(lane: int, lanes: Lanes, micro_batches: int) -> list[Action]:
    """Return the actions of a lane; where lanes hold several stages, a timetable finds their order.

    Enough forward passes to fill the pipeline come first. Each stage is idle as long as with GPipe, but stage s of P
    holds the activations of at most `P - s` micro-batches.
    """
    if any(len(held) > 1 for held in lanes):
        return list(timetable(lanes, micro_batches)[lane])
    (stage,) = lanes[lane]
    stages = 1 + max(held[0] for held in lanes)
    ahead = min(stages - stage - 1, micro_batches)
    actions = [Action(Kind.FORWARD, stage, micro) for micro in range(ahead)]
    for micro in range(micro_batches - ahead):
        actions += [Action(Kind.FORWARD, stage, ahead + micro), Action(Kind.BACKWARD, stage, micro)]
    return actions + [Action(Kind.BACKWARD, stage, micro) for micro in range(micro_batches - ahead, micro_batches)]


@schedule(
    "zb-h1",
    "ZB-H1 (Zero Bubble Pipeline Parallelism; Qi et al., ICLR 2024): weights' gradients fill the bubbles.",
)
def zero_bubble(lane: int, lanes: Lanes, micro_batches: int) -> list[Action]:
    """Return the actions of a lane: the order of 1F1B, with each backward pass split in two.

    The previous stage waits for the input part only; stage s runs the weight part of a micro-batch s micro-batches
    later, or when it has nothing else to do. With P equal stages, M micro-batches and three equal passes (forward,
    input part, weight part), each stage is idle for a fraction `(P - 1) / (3 M + P - 1)` of the step, about a third of
    1F1B's. Every stage holds as many activations as 1F1B's first stage: those of at most P micro-batches.
    """
    actions: list[Action] = []
    waiting: dict[int, list[Action]] = {stage: [] for stage in lanes[lane]}  # weight parts that are still to run
    for action in one_f_one_b(lane, lanes, micro_batches):
        if action.kind is Kind.FORWARD:
            actions.append(action)
            continue
        actions.append(Action(Kind.BACKWARD_INPUT, action.stage, action.micro))
        waiting[action.stage].append(Action(Kind.BACKWARD_WEIGHT, action.stage, action.micro))
        if len(waiting[action.stage]) > action.stage:
            actions.append(waiting[action.stage].pop(0))
    return actions + [left for stage in lanes[lane] for left in waiting[stage]]
