"""Describes the work of a step as actions, and the schedules: the orders in which ranks run them.

The engine's interpreter runs a list of actions, and the planner's simulation predicts the same list. For ranks that
hold any number of stages, passes are ordered by list scheduling: as in 1F1B, a backward pass goes before a forward
pass, and stage s of S holds at most `S - s` micro-batches. Under these bounds no order deadlocks: the last stage with a
forward pass to run has its input, and room for it.

A schedule is a row of `SCHEDULES`. Its passes are a pure function of a lane, all lanes and the number of micro-batches,
which returns the forward and backward actions of the lane. Each of its stages has one forward pass for every
micro-batch, and one backward pass or both of its parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
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


Passes = Callable[[int, Lanes, int], list[Action]]


@dataclass(frozen=True)
class Schedule:
    """Describes a schedule in `SCHEDULES`."""

    name: str  # in job files and plans
    about: str  # one sentence for the reference
    stages_per_rank: int  # how many the planner gives to each rank of a pipeline
    passes: Passes


SCHEDULES: dict[str, Schedule] = {}


def schedule(name: str, about: str, stages_per_rank: int = 1) -> Callable[[Passes], Passes]:
    """Add the function that this decorates to `SCHEDULES`, whose results are remembered."""

    def add(passes: Passes) -> Passes:
        remembered: Passes = functools.lru_cache(maxsize=4096)(passes)
        SCHEDULES[name] = Schedule(name, about, stages_per_rank, remembered)
        return remembered

    return add


@schedule("gpipe", "GPipe (Huang et al., NeurIPS 2019): all forward passes, then all backward passes.")
def gpipe(lane: int, lanes: Lanes, micro_batches: int) -> list[Action]:
    """Return the actions of a lane; backward passes run from the last micro-batch to the first.

    With P equal stages and M micro-batches, each stage is idle for a fraction `(P - 1) / (M + P - 1)` of the step, and
    holds the activations of all M micro-batches.
    """
    forward = evaluation(lanes[lane], micro_batches, len(lanes))
    return forward + [Action(Kind.BACKWARD, action.stage, action.micro) for action in reversed(forward)]


@schedule(
    "interleaved",
    "Interleaved 1F1B (Narayanan et al., SC 2021): every rank holds several stages, one from each turn around the "
    "ranks.",
    stages_per_rank=2,
)
def interleaved(lane: int, lanes: Lanes, micro_batches: int) -> list[Action]:
    """Return the actions of a lane.

    Because stages are shorter, the pipeline fills and drains sooner: with V stages per rank, each of P ranks is idle
    for a fraction `(P - 1) / (V M + P - 1)` of the step. Activations travel V times as often. Megatron-LM's order
    applies where the stages go round the ranks and the number of micro-batches is a multiple of the number of ranks; in
    other cases, a timetable finds an order.
    """
    ranks, turns = len(lanes), len(lanes[0])
    around = tuple(tuple(range(first, ranks * turns, ranks)) for first in range(ranks))
    if lanes != around or micro_batches % ranks:
        return list(timetable(lanes, micro_batches)[lane])
    rounds = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    held = lanes[lane]
    forward = [Action(Kind.FORWARD, stage, micro) for micros in rounds for stage in held for micro in micros]
    backward = [Action(Kind.BACKWARD, stage, micro) for micros in rounds for stage in held[::-1] for micro in micros]
    ahead = min(len(forward), 2 * (ranks - lane - 1) + (turns - 1) * ranks)
    actions = forward[:ahead]
    for number, action in enumerate(forward[ahead:]):
        actions += [action, backward[number]]
    return actions + backward[len(forward) - ahead :]


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
