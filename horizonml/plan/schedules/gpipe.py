"""GPipe (Huang et al., NeurIPS 2019): all forward passes, then all backward passes.

With P equal stages and M micro-batches, each stage is idle for a fraction `(P - 1) / (M + P - 1)` of the step, and
holds the activations of all M micro-batches.
"""

from __future__ import annotations

from horizonml.plan.actions import Action, Kind, Lanes, evaluation

NAME = "gpipe"
STAGES_PER_RANK = 1


def passes(lane: int, lanes: Lanes, micro_batches: int) -> list[Action]:
    """Return the actions of a lane; backward passes run from the last micro-batch to the first."""
    forward = evaluation(lanes[lane], micro_batches, len(lanes))
    return forward + [Action(Kind.BACKWARD, action.stage, action.micro) for action in reversed(forward)]
