"""Lists a rank's actions in a step with their costs: seconds of work, and messages to wait for and to send."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from horizonml.plan.plan import Plan, Stage
from horizonml.plan.schedules import Action, Kind
from horizonml.planner.cost import LayerTimes, gradient_message_bytes, message_bytes, message_work, trained_bytes
from horizonml.planner.problem import Problem

PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
LAST_PASSES = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)  # after these, a micro-batch's gradients are complete
_DUST = 1e-6  # rows that only rounding makes of two stages' average parts


@dataclass(frozen=True, slots=True)
class SimulatedTask:
    """Pairs an action of one rank with its cost."""

    action: Action
    work: float = 0.0  # seconds on a core of its own
    inputs: int = 0  # messages that must have arrived
    receiver: int = -1  # the stage that the messages below are for
    sends: tuple[tuple[int, float], ...] = ()  # each message's rank and bytes


Costs = tuple[float, int, int, tuple[tuple[int, float], ...]]  # all fields of a task except its action
_Rows = Sequence[tuple[float, float]]  # of each member of a stage


class TaskMaker:
    """Makes the tasks of a plan's ranks."""

    def __init__(self, problem: Problem, plan: Plan, times: LayerTimes) -> None:
        """Prepare the tasks of a plan; `times` are those of the problem's profiles."""
        self._problem, self._plan, self._times = problem, plan, times
        self.sizes = plan.micro_sizes(problem.batch_size, problem.batch_size)
        self._rows = [{size: stage.mean_rows(size) for size in set(self.sizes)} for stage in plan.stages]
        lists = {held: plan.actions(rank, len(self.sizes)) for rank, held in self._ranks()}
        self.actions = {rank: lists[held] for rank, held in self._ranks()}

    def _ranks(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield every rank with the stages that it holds."""
        for stage in self._plan.stages:
            for rank in stage.ranks:
                yield rank, self._plan.stages_of(rank)

    def tasks(self) -> dict[int, list[SimulatedTask]]:
        """Return every rank's tasks in their order, without those that cost nothing."""
        stages = self._plan.stages
        made: dict[int, dict[tuple[int, Kind, int], Costs]] = {rank: {} for rank in self.actions}
        for number, stage in enumerate(stages):
            for member, rank in enumerate(stage.ranks):
                for size in self._rows[number]:
                    for kind, costs in self._passes(number, member, size):
                        made[rank][number, kind, size] = costs
        return {rank: list(self._listed(rank, made[rank])) for rank in made}

    def _listed(self, rank: int, made: dict[tuple[int, Kind, int], Costs]) -> Iterator[SimulatedTask]:
        for action in self.actions[rank]:
            stage = self._plan.stages[action.stage]
            if action.kind in PASSES:
                costs = made.get((action.stage, action.kind, self.sizes[action.micro]))
                if costs is not None:
                    yield SimulatedTask(action, *costs)
            elif action.kind is Kind.REDUCE and len(stage.ranks) > 1 and not stage.sync.steps_alone:
                yield SimulatedTask(action)
            elif action.kind is Kind.UPDATE:
                profile = self._problem.profiles[rank]
                work = trained_bytes(profile, stage) * profile.update_seconds_per_byte
                if stage.sync.steps_alone:  # a member updates when it has worked on an equal part of a batch
                    work *= len(stage.ranks) * stage.shares[stage.ranks.index(rank)] / sum(stage.shares)
                if work > 0:
                    yield SimulatedTask(action, work)

    def _passes(self, number: int, member: int, size: int) -> Iterator[tuple[Kind, Costs]]:
        """Yield the costs of a member's passes of a micro-batch of `size`, or nothing if it has no rows of it.

        Half of a backward pass counts as its input part and half as its weight part. The first stage, or one that
        begins with the first layers that are trained, needs no gradient of its input, so all of its backward pass is
        the weight part. Where nothing is trained, there is only an input part.
        """
        stage = self._plan.stages[number]
        rank, (first, end) = stage.ranks[member], self._rows[number][size][member]
        if first == end:
            return
        profile = self._problem.profiles[rank]
        share = stage.shares[member] / sum(stage.shares) if stage.splits_channels else 1.0
        rows = end - first
        if stage.sync.steps_alone:  # a member computes on an equal part of a batch at a time, as often as is its share
            rows = size / len(stage.ranks)
            share = (end - first) / rows
        forward, backward = (share * seconds for seconds in self._times.passes(rank, stage.start, stage.stop, rows))
        before, after = (self._peers(number + step, size, (first, end)) for step in (-1, 1))
        forward_coding = backward_coding = 0.0
        for place, peers, sender in ((stage.start, before, number - 1), (stage.stop, after, number)):
            if not peers:
                continue
            send = self._plan.stages[sender].send
            layer = profile.layers[place - 1]
            rows = sum(count for peer, count in peers if peer != rank)  # what a rank sends to itself costs nothing
            if rows:
                messages = sum(peer != rank for peer, _ in peers)
                far = 0.0
                if profile.crossing_seconds_per_byte:
                    far = sum(count for peer, count in peers if self._problem.apart(peer, rank))
                size_out, size_back = layer.output_bytes, layer.gradients
                forward_coding += message_work(profile, rows * size_out, send, messages, far * size_out)
                if layer.returns_gradients:
                    backward_coding += message_work(profile, rows * size_back, send, messages, far * size_back)
        on: tuple[tuple[int, float], ...] = ()
        back: tuple[tuple[int, float], ...] = ()
        returned, weight = 0, backward
        if after:
            each = message_bytes(profile, stage.stop, stage.send)
            on = tuple((peer, each * count) for peer, count in after)
            returned = len(after) if profile.layers[stage.stop - 1].returns_gradients else 0
        if before and profile.layers[stage.start - 1].returns_gradients:
            each = gradient_message_bytes(profile, stage.start, self._plan.stages[number - 1].send)
            back = tuple((peer, each * count) for peer, count in before)
            trained = any(layer.trained_bytes != 0 for layer in profile.layers[stage.start : stage.stop])
            weight = backward / 2 if trained else 0.0
        yield Kind.FORWARD, (forward + forward_coding, len(before), number + 1, on)
        yield Kind.BACKWARD, (backward + backward_coding, returned, number - 1, back)
        yield Kind.BACKWARD_INPUT, (backward - weight + backward_coding, returned, number - 1, back)
        yield Kind.BACKWARD_WEIGHT, (weight, 0, -1, ())

    def _peers(self, other: int, size: int, own: tuple[float, float]) -> list[tuple[int, float]]:
        """Return the ranks of stage `other` that share rows with a rank, and how many; empty if there is no stage."""
        if not 0 <= other < len(self._plan.stages):
            return []
        return _overlaps(own, self._rows[other][size], self._plan.stages[other])


def _overlaps(own: tuple[float, float], rows: _Rows, stage: Stage) -> list[tuple[int, float]]:
    """Return the members of a stage with which a rank shares rows, and how many; `rows` are consecutive."""
    place = bisect.bisect_right(rows, own[0], key=lambda part: part[1])
    found = []
    while place < len(rows) and rows[place][0] < own[1]:
        shared = min(own[1], rows[place][1]) - max(own[0], rows[place][0])
        if shared > _DUST:
            found.append((stage.ranks[place], shared))
        place += 1
    return found
