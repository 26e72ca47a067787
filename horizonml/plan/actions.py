"""Describes the work of a training step as data: what a rank does, and in which order.

The engine's interpreter runs a list of actions, and the planner's simulation predicts the same list. For ranks that
hold any number of stages, passes are ordered by list scheduling: as in 1F1B, a backward pass goes before a forward
pass, and stage s of S holds at most `S - s` micro-batches. Under these bounds no order deadlocks: the last stage with a
forward pass to run has its input, and room for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Tells what an action does."""

    FORWARD = "forward"
    BACKWARD = "backward"  # both parts below in one
    BACKWARD_INPUT = "backward-input"  # computes the gradient of the stage's input, for which the previous stage waits
    BACKWARD_WEIGHT = "backward-weight"  # computes the gradients of the stage's own parameters; no stage waits for them
    REDUCE = "reduce"  # sums gradients over the stage's members
    UPDATE = "update"  # updates the stage's parameters


@dataclass(frozen=True, slots=True)
class Action:
    """Describes one piece of work; `micro` is the number of its micro-batch, or -1 for reductions and updates."""

    kind: Kind
    stage: int
    micro: int = -1


# The stages that each lane holds, in their order. A lane is a set of ranks that hold the same stages and run the same
# actions in the same order, each for its own rows.
Lanes = tuple[tuple[int, ...], ...]


def evaluation(held: Sequence[int], micro_batches: int, lanes: int) -> list[Action]:
    """Return the forward passes alone, for a rank that holds the stages `held`, in a plan with so many lanes.

    A rank with several stages takes a few micro-batches at a time through all of them, one for each lane: with all
    micro-batches at a time, ranks would send each other more than they receive, and wait for each other.
    """
    rounds = [range(first, min(first + lanes, micro_batches)) for first in range(0, micro_batches, lanes)]
    return [Action(Kind.FORWARD, stage, micro) for micros in rounds for stage in held for micro in micros]


def with_update(passes: Sequence[Action]) -> list[Action]:
    """Return the actions of a whole step: forward and backward `passes`, then the reductions and the updates."""
    stages = sorted({action.stage for action in passes})
    return [
        *passes,
        *(Action(Kind.REDUCE, stage) for stage in stages),
        *(Action(Kind.UPDATE, stage) for stage in stages),
    ]


def most_held(actions: Sequence[Action], stage: int) -> int:
    """Return the largest number of micro-batches whose activations a stage holds at once."""
    return most_bytes_held(actions, {stage: 1})


def most_bytes_held(actions: Sequence[Action], sizes: Mapping[int, int]) -> int:
    """Return the largest number of bytes of activations that the stages hold together at once.

    `sizes[s]` is the number of bytes that stage s keeps of a micro-batch between its forward and its last backward
    action; stages that are not in it do not count.
    """
    held = most = 0
    for action in actions:
        if action.kind is Kind.FORWARD:
            held += sizes.get(action.stage, 0)
            most = max(most, held)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            held -= sizes.get(action.stage, 0)
    return most


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
