"""Orders the passes of ranks that hold any number of stages, by list scheduling."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from horizonml.plan.schedules.actions import Action, Kind, Lanes

_PASS_SECONDS, _MESSAGE_SECONDS = 1.0, 0.05  # relative: of a forward pass or a part of a backward pass; of a message
_URGENCY = {Kind.BACKWARD: 0, Kind.BACKWARD_INPUT: 0, Kind.FORWARD: 1, Kind.BACKWARD_WEIGHT: 2}
_Urgency = tuple[float, int, int, int]


@functools.lru_cache(maxsize=1024)
def timetable(lanes: Lanes, micro_batches: int, split: bool = False) -> tuple[tuple[Action, ...], ...]:
    """Return the passes of every lane, assuming that all stages take equally long.

    What can begin first does; then a backward pass goes before a forward pass, and later stages go before earlier ones.
    With `split`, backward passes have two parts, and a lane that would wait computes gradients of weights instead. Of
    two orders, made as if messages took no time and as if they took a little, the one is taken that ends first.

    No order deadlocks: the oldest micro-batch that is under way always finds room for its next pass. With whole
    backward passes, stage s of S holds at most `S - s` micro-batches, as in 1F1B. With parts, a lane holds at most one
    and a half times as many stages' activations as there are stages, of which one is kept for each later stage.
    """
    made = [_Table(lanes, micro_batches, split, message) for message in (0.0, _MESSAGE_SECONDS)]
    orders = [table.ordered() for table in made]
    best = min(orders, key=lambda order: _Table(lanes, micro_batches, split, _MESSAGE_SECONDS).replayed(order))
    return tuple(tuple(action for action in best if action.stage in held) for held in lanes)


class _Table:
    """Holds the passes that have been ordered, and the times at which they end."""

    def __init__(self, lanes: Lanes, micro_batches: int, split: bool, message: float) -> None:
        self._lanes, self._micro_batches, self._split, self._message = lanes, micro_batches, split, message
        self._stages = 1 + max(stage for held in lanes for stage in held)
        self._holding = [[lane for lane, held in enumerate(lanes) if stage in held] for stage in range(self._stages)]
        self._ends: dict[Kind, list[list[float]]] = {kind: [[] for _ in range(self._stages)] for kind in _URGENCY}
        self._free, self._held = [0.0] * len(lanes), [0] * len(lanes)  # activations of micro-batches in all stages
        self._backward = Kind.BACKWARD_INPUT if split else Kind.BACKWARD

    def ordered(self) -> list[Action]:
        """Return all passes, in the order in which they begin."""
        order: list[Action] = []
        urgent: dict[int, tuple[_Urgency, Action]] = {}  # the most urgent pass of each stage
        changed = set(range(self._stages))
        while True:
            for stage in changed:
                urgent.pop(stage, None)
                if found := list(self._candidates(stage)):
                    urgent[stage] = min(found, key=lambda one: one[0])
            if not urgent:
                return order
            (start, *_), action = min(urgent.values(), key=lambda one: one[0])
            order.append(action)
            changed = self._run(action, start)

    def replayed(self, order: Sequence[Action]) -> float:
        """Return after how many seconds passes have ended that run in this order."""
        for action in order:
            start = next(urgency[0] for urgency, found in self._candidates(action.stage) if found == action)
            self._run(action, start)
        return max(self._free)

    def _candidates(self, stage: int) -> Iterator[tuple[_Urgency, Action]]:
        """Yield the passes that a stage may run next, each with its urgency, which begins with its start."""
        forward, backward = self._ends[Kind.FORWARD], self._ends[self._backward]
        micro = len(forward[stage])
        if micro < self._micro_batches and self._has_room(stage) and (not stage or micro < len(forward[stage - 1])):
            ready = self._arrives(forward[stage - 1][micro], stage - 1, stage) if stage else 0.0
            yield self._urgency(Kind.FORWARD, stage, micro, ready)
        micro, last = len(backward[stage]), stage == self._stages - 1
        if micro < len(forward[stage]) and (last or micro < len(backward[stage + 1])):
            after = self._arrives(backward[stage + 1][micro], stage + 1, stage) if not last else 0.0
            yield self._urgency(self._backward, stage, micro, max(forward[stage][micro], after))
        micro = len(self._ends[Kind.BACKWARD_WEIGHT][stage])
        if self._split and micro < len(backward[stage]):
            yield self._urgency(Kind.BACKWARD_WEIGHT, stage, micro, 0.0)

    def _run(self, action: Action, start: float) -> set[int]:
        """Let a pass begin, and return the stages whose next passes may be others now."""
        stage, frees = action.stage, action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        end = start + (2 if action.kind is Kind.BACKWARD else 1) * _PASS_SECONDS
        self._ends[action.kind][stage].append(end)
        for lane in self._holding[stage]:
            self._free[lane] = end
            self._held[lane] += (action.kind is Kind.FORWARD) - frees
        beside = {stage - 1, stage + 1} & set(range(self._stages))
        return beside.union(*(self._lanes[lane] for lane in self._holding[stage]))

    def _urgency(self, kind: Kind, stage: int, micro: int, ready: float) -> tuple[_Urgency, Action]:
        start = max(ready, *(self._free[lane] for lane in self._holding[stage]))
        order = -stage if kind is Kind.FORWARD else micro
        return (start, _URGENCY[kind], order, -stage), Action(kind, stage, micro)

    def _arrives(self, end: float, source: int, stage: int) -> float:
        """Return when a stage has what another one has computed, which takes no time within one lane."""
        return end if self._holding[source] == self._holding[stage] else end + self._message

    def _has_room(self, stage: int) -> bool:
        if not self._split:
            return len(self._ends[Kind.FORWARD][stage]) - len(self._ends[Kind.BACKWARD][stage]) < self._stages - stage
        most = 3 * self._stages // 2
        return all(
            self._held[lane] < max(most, len(self._lanes[lane])) - sum(other > stage for other in self._lanes[lane])
            for lane in self._holding[stage]
        )
