"""Runs the actions of a step on the stages of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from horizonml.engine.clock import Clock
from horizonml.engine.stage import StageRuntime
from horizonml.plan.actions import Action, Kind

_POSTED_AHEAD = 2  # how many actions ahead receives are posted
_LAST = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)  # after these, a micro-batch's gradients are complete


def run_passes(actions: Sequence[Action], stages: Mapping[int, StageRuntime], clock: Clock) -> None:
    """Run forward and backward actions in the given order. Raises PeerLost.

    `actions` must not contain actions on micro-batches of which this rank has no rows.
    """
    last = {action.stage: index for index, action in enumerate(actions) if action.kind in _LAST}
    for index, action in enumerate(actions):
        for ahead in actions[index if index == 0 else index + _POSTED_AHEAD : index + _POSTED_AHEAD + 1]:
            stages[ahead.stage].expect(ahead)
        stage = stages[action.stage]
        if last.get(action.stage) == index:
            stage.sync.arm(stage.weight, stage.pending(action))
        match action.kind:
            case Kind.FORWARD:
                stage.forward(action.micro)
            case Kind.BACKWARD:
                stage.backward(action.micro)
            case Kind.BACKWARD_INPUT:
                stage.backward_input(action.micro)
            case Kind.BACKWARD_WEIGHT:
                stage.backward_weight(action.micro)
            case Kind.REDUCE | Kind.UPDATE:
                raise ValueError(f"{action} is no pass")
        clock.switch("compute", "prepare")
