"""Schedules and timetables: complete, without deadlocks, and with the bubbles that they promise."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from horizonml.plan.schedules import SCHEDULES, Action, Kind, Lanes, most_bytes_held, with_update

SECONDS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
ODD_LANES: list[Lanes] = [
    ((0, 2), (1,)),
    ((0,), (1, 2), (3,)),
    ((0, 1), (2, 3)),
    ((0, 3), (1,), (2,)),
    ((0, 2), (1, 2)),
]


def lanes_of(name: str, ranks: int) -> Lanes:
    """The lanes of a pipeline as the planner makes it for a schedule."""
    holders = SCHEDULES[name].around(ranks)
    return tuple(tuple(stage for stage, holder in enumerate(holders) if holder == rank) for rank in range(ranks))


def makespan(lanes: Lanes, lists: Sequence[Sequence[Action]]) -> float:
    """Run the lanes' actions in unit times; fails if they wait for each other."""
    last = max(stage for held in lanes for stage in held)
    ends: dict[tuple[bool, int, int, int], float] = {}  # by forward or not, stage, micro-batch and lane
    free, position = [0.0] * len(lanes), [0] * len(lanes)
    while any(position[lane] < len(actions) for lane, actions in enumerate(lists)):
        before = list(position)
        for lane, actions in enumerate(lists):
            if position[lane] == len(actions):
                continue
            action = actions[position[lane]]
            forward = action.kind is Kind.FORWARD
            source = action.stage - 1 if forward else action.stage + 1
            needed: list[float | None] = []
            if 0 <= source <= last and action.kind is not Kind.BACKWARD_WEIGHT:
                others = [other for other, held in enumerate(lanes) if source in held]
                needed = [ends.get((forward, source, action.micro, other)) for other in others]
            if None in needed:
                continue
            free[lane] = max([free[lane], *(end for end in needed if end is not None)]) + SECONDS[action.kind]
            if action.kind is not Kind.BACKWARD_WEIGHT:
                ends[forward, action.stage, action.micro, lane] = free[lane]
            position[lane] += 1
        assert position != before, "deadlock"
    return max(free)


def check_complete(actions: Sequence[Action], held: Sequence[int], micros: int) -> None:
    for stage in held:
        for micro in range(micros):
            kinds = [action.kind for action in actions if (action.stage, action.micro) == (stage, micro)]
            assert kinds in (
                [Kind.FORWARD, Kind.BACKWARD],
                [Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT],
            )
    assert {action.stage for action in actions} == set(held)


def shapes(name: str) -> list[Lanes]:
    """The lanes of 1, 3 and 5 ranks as the planner makes them, and ranks that hold any stages."""
    return [*(lanes_of(name, ranks) for ranks in (1, 3, 5)), *ODD_LANES]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_complete_and_does_not_deadlock(name: str) -> None:
    for lanes, micros in itertools.product(shapes(name), (1, 2, 5, 8)):
        lists = [SCHEDULES[name].passes(lane, lanes, micros) for lane in range(len(lanes))]
        for actions, held in zip(lists, lanes, strict=True):
            check_complete(actions, held, micros)
        seconds = makespan(lanes, lists)
        if name in ("gpipe", "1f1b") and lanes not in ODD_LANES:
            assert seconds == 3 * (micros + len(lanes) - 1), "the bubble that the formula says"


@pytest.mark.parametrize("name", ["zb-h1", "zb-interleaved", "zb-v"])
def test_zero_bubble_comes_near_its_limit_and_holds_no_more_than_it_says(name: str) -> None:
    for ranks, micros in ((2, 8), (3, 7), (5, 5), (5, 20), (8, 8)):
        lanes, passes = lanes_of(name, ranks), 3 * SCHEDULES[name].stages_per_rank * micros
        lists = [SCHEDULES[name].passes(lane, lanes, micros) for lane in range(ranks)]
        assert makespan(lanes, lists) <= (passes + ranks - 1) / 0.95
        sizes = dict.fromkeys(range(len(SCHEDULES[name].around(ranks))), 1)
        most = ranks if name == "zb-h1" else 3 * ranks  # stages' activations
        assert max(most_bytes_held(actions, sizes) for actions in lists) <= most


def test_1f1b_holds_no_more_than_the_stages_behind_it() -> None:
    lanes = lanes_of("1f1b", 4)
    assert [most_bytes_held(SCHEDULES["1f1b"].passes(lane, lanes, 16), {lane: 1}) for lane in range(4)] == [4, 3, 2, 1]
    assert [most_bytes_held(SCHEDULES["gpipe"].passes(lane, lanes, 16), {lane: 1}) for lane in range(4)] == [16] * 4


def test_a_step_ends_with_a_reduction_and_an_update_of_every_stage() -> None:
    passes = SCHEDULES["gpipe"].passes(0, ((0, 1),), 2)
    actions = with_update(passes)
    assert actions[: len(passes)] == passes
    assert actions[len(passes) :] == [Action(kind, stage) for kind in (Kind.REDUCE, Kind.UPDATE) for stage in (0, 1)]
