"""1F1B (PipeDream-Flush; Narayanan et al., ICML 2021): one backward pass after each forward pass.

Enough forward passes to fill the pipeline come first. Each stage is idle as long as with GPipe, but stage s of P holds
the activations of at most `P - s` micro-batches.
"""

from __future__ import annotations

from horizonml.plan.actions import Action, Kind, Lanes, timetable

NAME = "1f1b"
STAGES_PER_RANK = 1


def passes(lane: int, lanes: Lanes, micro_batches: int) -> list[Action]:
    """Return the actions of a lane; where lanes hold several stages, a timetable finds their order."""
    if any(len(held) > 1 for held in lanes):
        return list(timetable(lanes, micro_batches)[lane])
    (stage,) = lanes[lane]
    stages = 1 + max(held[0] for held in lanes)
    ahead = min(stages - stage - 1, micro_batches)
    actions = [Action(Kind.FORWARD, stage, micro) for micro in range(ahead)]
    for micro in range(micro_batches - ahead):
        actions += [Action(Kind.FORWARD, stage, ahead + micro), Action(Kind.BACKWARD, stage, micro)]
    return actions + [Action(Kind.BACKWARD, stage, micro) for micro in range(micro_batches - ahead, micro_batches)]
