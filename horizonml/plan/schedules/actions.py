"""Describes the work of a step as actions, and a schedule as what orders them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
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


Passes = Callable[[int, Lanes, int], list[Action]]


@dataclass(frozen=True)
class Schedule:
    """Describes a schedule in `SCHEDULES`."""

    name: str  # in job files and plans
    about: str  # one sentence for the reference
    stages_per_rank: int  # how many the planner gives to each rank of a pipeline
    returns: bool  # whether each turn goes back the way that the one before it came
    passes: Passes

    def around(self, ranks: int) -> list[int]:
        """Return which of so many ranks, or groups of ranks, holds each stage of a pipeline, in the order of stages."""
        there, back = list(range(ranks)), list(range(ranks))[:: -1 if self.returns else 1]
        return [rank for turn in range(self.stages_per_rank) for rank in (back if turn % 2 else there)]


SCHEDULES: dict[str, Schedule] = {}


def schedule(name: str, about: str, stages_per_rank: int = 1, returns: bool = False) -> Callable[[Passes], Passes]:
    """Add the function that this decorates to `SCHEDULES`, whose results are remembered."""

    def add(passes: Passes) -> Passes:
        remembered: Passes = functools.lru_cache(maxsize=4096)(passes)
        SCHEDULES[name] = Schedule(name, about, stages_per_rank, returns, remembered)
        return remembered

    return add
