"""Orders passes for ranks that hold any number of stages, by list scheduling.

As in 1F1B, a backward pass goes before a forward pass, and stage s of S holds at most `S - s` micro-batches. Under
these bounds no order deadlocks: the last stage with a forward pass to run has its input, and room for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from horizonml.plan.actions import Action, Kind, Lanes

_SECONDS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}  # relative durations of a stage's passes
_Ends = list[list[float]]  # when the passes of a stage end, by stage and micro-batch


@functools.lru_cache(maxsize=1024)
def timetable(lanes: Lanes, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the forward and backward passes of every lane, assuming that all stages take equally long."""
    stages = 1 + max(stage for held in lanes for stage in held)
    holding = [[lane for lane, held in enumerate(lanes) if stage in held] for stage in range(stages)]
    forward: _Ends = [[] for _ in range(stages)]
    backward: _Ends = [[] for _ in range(stages)]
    free = [0.0] * len(lanes)
    actions: list[list[Action]] = [[] for _ in lanes]

    def urgency(candidate: tuple[Action, float]) -> tuple[float, bool, int, int]:
        """Return a sort key: the earliest first, backward before forward, and later stages first among the forward."""
        action, ready = candidate
        start = max(ready, *(free[lane] for lane in holding[action.stage]))
        is_forward = action.kind is Kind.FORWARD
        return start, is_forward, -action.stage if is_forward else action.micro, -action.stage

    for _ in range(2 * stages * micro_batches):
        action, ready = min(_candidates(forward, backward, micro_batches), key=urgency)
        end = max(ready, *(free[lane] for lane in holding[action.stage])) + _SECONDS[action.kind]
        (forward if action.kind is Kind.FORWARD else backward)[action.stage].append(end)
        for lane in holding[action.stage]:
            free[lane] = end
            actions[lane].append(action)
    return tuple(map(tuple, actions))


def _candidates(forward: _Ends, backward: _Ends, micro_batches: int) -> Iterator[tuple[Action, float]]:
    """Yield the next passes of all stages, each with the time at which its inputs are available."""
    stages = len(forward)
    for stage in range(stages):
        micro = len(forward[stage])
        room = micro - len(backward[stage]) < stages - stage
        if micro < micro_batches and room and (stage == 0 or micro < len(forward[stage - 1])):
            yield Action(Kind.FORWARD, stage, micro), forward[stage - 1][micro] if stage else 0.0
        micro = len(backward[stage])
        if micro < len(forward[stage]) and (stage == stages - 1 or micro < len(backward[stage + 1])):
            after = backward[stage + 1][micro] if stage < stages - 1 else 0.0
            yield Action(Kind.BACKWARD, stage, micro), max(forward[stage][micro], after)
