"""The schedules: the orders in which ranks run the actions of a step.

The engine's interpreter runs a list of actions, and the planner's simulation predicts the same list. A schedule is a
row of `SCHEDULES`. Its passes are a pure function of a lane, all lanes and the number of micro-batches, which returns
the forward and backward actions of the lane. Each of its stages has one forward pass for every micro-batch, and one
backward pass or both of its parts.
"""

from horizonml.plan.schedules import basic, interleaved, zb_interleaved, zb_v
from horizonml.plan.schedules.actions import SCHEDULES, Action, Kind, Lanes, evaluation, most_bytes_held, with_update

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Lanes",
    "basic",
    "evaluation",
    "interleaved",
    "most_bytes_held",
    "with_update",
    "zb_interleaved",
    "zb_v",
]
