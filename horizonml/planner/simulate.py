"""Predicts a plan's step time and memory from profiles, without a process group.

A discrete-event simulation of the schedule: each rank works through its actions in order, an action waits for the
tensors it needs, what a rank sends goes one after the other over its link, and ranks that share a machine share its
cores. It covers what closed formulas such as Asteroid's (MobiCom 2024, section 4) leave out: uneven stages and shares,
few micro-batches, links that are busy, and more ranks than cores.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horizonml.plan.actions import Action, Kind, most_held
from horizonml.plan.plan import FORMATS, Plan
from horizonml.planner.cores import Machine, cores_of
from horizonml.planner.hardware import Host, Network
from horizonml.planner.profile import Profile
from horizonml.planner.sums import summed_at

_EPSILON = 1e-12


@dataclass(frozen=True)
class Prediction:
    """What a plan would cost."""

    seconds: float  # of a step
    parts: dict[str, float]  # what the seconds of the last stage to finish consist of
    memory: dict[int, float]  # bytes of parameters, gradients, optimizer state and activations, by rank
    lacking: dict[int, float]  # bytes that ranks lack, of those that do; empty if the plan fits
    busy: dict[int, float]  # seconds of a step in which a rank computes on a core of its own
    updating: dict[int, float]  # seconds in which a rank updates its parameters
    spans: list[tuple[int, str, int, float, float]]  # rank, "forward" or "backward", micro-batch, begin and end
    messages: list[tuple[int, int, float, float]]  # from which rank to which, begin and end of the transfer

    @property
    def computing(self) -> dict[int, float]:
        """Seconds of a step in which a rank computes, those included in which it has to share its cores."""
        total = dict.fromkeys(self.busy, 0.0)
        for rank, _, _, begin, end in self.spans:
            total[rank] += end - begin
        return {rank: seconds + self.updating[rank] for rank, seconds in total.items()}

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory it needs."""
        return not self.lacking


def predict(
    plan: Plan,
    profiles: Profile | Sequence[Profile],
    batch_size: int,
    hosts: Sequence[Host],
    network: Network,
    optimizer_copies: int,
    gradient_ratio: float = 1.0,
) -> Prediction:
    """Step time and memory of a plan.

    `profiles` is one for all ranks, or one for each. `optimizer_copies` is 1 for momentum SGD, 2 for Adam, 0 for plain
    SGD. `gradient_ratio` says to what part of their bytes gradients are compressed on their way within a stage.
    """
    own = [profiles] * plan.world_size if isinstance(profiles, Profile) else list(profiles)
    sizes = plan.micro_sizes(batch_size, batch_size)
    simulation = _Simulation(plan, own, sizes, hosts, network)
    finish = simulation.run()
    if any(host.cores < 1 for host in hosts):  # what a step leaves of a quota is there for the next one
        simulation = _Simulation(plan, own, sizes, hosts, network, simulation.allowances(max(finish.values())))
        finish = simulation.run()
    crowd = {rank: max(1.0, len(host.ranks) / host.cores) for host in hosts for rank in host.ranks}
    parts: dict[str, float] = {}
    updating = {}
    for stage in plan.stages:
        size = sum(layer.parameter_bytes for layer in own[stage.ranks[0]].layers[stage.start : stage.stop])
        for rank in stage.ranks:
            updating[rank] = size * own[rank].update_seconds_per_byte * crowd[rank]
        passes = max(finish[rank] for rank in stage.ranks)
        summed = summed_at(stage, simulation.last_backward, own, gradient_ratio, network, hosts)
        done = {
            "forward and backward passes": passes,
            "summing gradients": summed - passes,
            "updating parameters": max(updating[rank] for rank in stage.ranks),
        }
        parts = max(parts, done, key=lambda one: sum(one.values()))
    memory = {
        rank: _memory(plan, own[rank], number, rows, sizes, optimizer_copies)
        for number, stage in enumerate(plan.stages)
        for rank, rows in zip(stage.ranks, stage.rows(max(sizes)), strict=True)
    }
    capacity = {rank: host.memory for host in hosts for rank in host.ranks}
    return Prediction(
        sum(parts.values()),
        parts,
        memory,
        {rank: need - capacity[rank] for rank, need in memory.items() if need > capacity[rank]},
        {rank: sum(task.work for task in tasks) for rank, tasks in simulation.tasks.items()},
        updating,
        simulation.spans,
        simulation.messages,
    )


@dataclass(frozen=True)
class _Task:
    action: Action
    work: float  # seconds on a core of its own
    inputs: int  # messages that must have arrived
    sends: tuple[tuple[int, float], ...]  # to which rank how many bytes


class _Simulation:
    """One step of a plan."""

    def __init__(
        self,
        plan: Plan,
        profiles: Sequence[Profile],
        sizes: list[int],
        hosts: Sequence[Host],
        network: Network,
        allowances: Sequence[float] | None = None,
    ) -> None:
        self.spans: list[tuple[int, str, int, float, float]] = []
        self.messages: list[tuple[int, int, float, float]] = []
        self.last_backward: dict[int, tuple[float, float]] = {}  # begin and end, by rank
        self._network = network
        self._cores = cores_of(hosts, allowances or [0.0] * len(hosts))
        self._host_of = {rank: self._cores[number] for number, host in enumerate(hosts) for rank in host.ranks}
        self.tasks: dict[int, list[_Task]] = {}
        rows = [{size: stage.rows(size) for size in set(sizes)} for stage in plan.stages]
        for number, stage in enumerate(plan.stages):
            for member, rank in enumerate(stage.ranks):
                passes = (Kind.FORWARD, Kind.BACKWARD)
                actions = [a for a in plan.actions(rank, len(sizes)) if a.kind in passes]
                self.tasks[rank] = _tasks(plan, profiles[rank], number, member, sizes, actions, rows)
        self._position = dict.fromkeys(self.tasks, 0)
        self._arrived: dict[tuple[int, str, int], int] = {}
        self._link_free = dict.fromkeys(self.tasks, 0.0)
        self._began: dict[int, float] = {}
        self._events: list[tuple[float, int, int, int, str, int]] = []
        self._count = 0

    def run(self) -> dict[int, float]:
        """When each rank has finished its last action."""
        finish = dict.fromkeys(self.tasks, 0.0)
        for rank in self.tasks:
            self._try(rank, 0.0)
        while self._events:
            now, _, number, version, kind, micro = heapq.heappop(self._events)
            if kind:  # a message for rank `number`
                key = (number, kind, micro)
                self._arrived[key] = self._arrived.get(key, 0) + 1
                self._try(number, now)
                continue
            cores = self._cores[number]
            if cores.version != version:
                continue
            if not cores.dedicated:
                cores.machine.advance(now)
            ended = [rank for rank, left in cores.left.items() if left <= _EPSILON + 1e-9 * now]
            for rank in ended:
                del cores.left[rank]
            for rank in ended:
                finish[rank] = now
                self._complete(rank, now)
            if not cores.dedicated:
                self._schedule(cores.machine)
        assert all(self._position[rank] == len(tasks) for rank, tasks in self.tasks.items()), "the schedule stopped"
        return finish

    def allowances(self, now: float) -> list[float]:
        """What the machines' quotas allow at a moment after the last action."""
        for cores in self._cores:
            cores.machine.advance(now)
        return [cores.allowance for cores in self._cores]

    def _complete(self, rank: int, now: float) -> None:
        task = self.tasks[rank][self._position[rank]]
        began = self._began.pop(rank)
        self.spans.append((rank, task.action.kind, task.action.micro, began, now))
        if task.action.kind == "backward":
            self.last_backward[rank] = began, now
        self._position[rank] += 1
        for peer, size in task.sends:
            latency, bandwidth = self._network.between(rank, peer)
            begin = max(now, self._link_free[rank])
            free = begin + size / bandwidth
            self._link_free[rank] = free
            self.messages.append((rank, peer, begin, free + latency))
            self._push(free + latency, peer, 0, task.action.kind, task.action.micro)
        self._try(rank, now)

    def _try(self, rank: int, now: float) -> None:
        """Begin the rank's next action if it is idle and everything for it is here."""
        position = self._position[rank]
        if rank in self._began or position == len(self.tasks[rank]):
            return
        task = self.tasks[rank][position]
        if self._arrived.get((rank, task.action.kind, task.action.micro), 0) < task.inputs:
            return
        cores = self._host_of[rank]
        self._began[rank] = now
        if cores.dedicated:  # nothing can slow it down: no need to follow its work
            cores.left[rank] = 0.0
            cores.version += 1
            self._push(now + task.work, cores.number, cores.version, "", 0)
            return
        cores.machine.advance(now)
        cores.left[rank] = task.work
        self._schedule(cores.machine)

    def _schedule(self, machine: Machine) -> None:
        """Note when the speed of the machine's ranks changes next."""
        for cores in machine.hosts:
            cores.version += 1
            if cores.left:
                self._push(machine.now + cores.next_change, cores.number, cores.version, "", 0)

    def _push(self, at: float, number: int, version: int, kind: str, micro: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, number, version, kind, micro))


def _tasks(
    plan: Plan,
    profile: Profile,
    number: int,
    member: int,
    sizes: list[int],
    actions: Sequence[Action],
    rows: Sequence[Mapping[int, list[tuple[int, int]]]],
) -> list[_Task]:
    """A rank's actions; `rows[s][size]` are the rows of the members of stage s in a micro-batch of `size`."""
    stage = plan.stages[number]
    share = stage.shares[member] / sum(stage.shares) if stage.splits_channels else 1.0
    made: dict[int, dict[str, tuple[float, int, tuple[tuple[int, float], ...]]]] = {}
    for size in set(sizes):
        first, end = rows[number][size][member]
        if first == end:
            continue
        pairs = [profile.seconds(layer, end - first) for layer in range(stage.start, stage.stop)]
        before: list[tuple[int, int]] = []
        after: list[tuple[int, int]] = []
        if number > 0:
            before = _overlaps((first, end), rows[number - 1][size], plan.stages[number - 1].ranks)
        if number + 1 < len(plan.stages):
            after = _overlaps((first, end), rows[number + 1][size], plan.stages[number + 1].ranks)
        forward, backward = (share * sum(pair[way] for pair in pairs) for way in (0, 1))
        coding = profile.message_seconds * (len(before) + len(after))
        entry = exit_ = 0.0  # bytes per sample on the links
        if before:
            size_, format = profile.layers[stage.start - 1].output_bytes, plan.stages[number - 1].send
            entry = size_ * FORMATS[format]
            coding += (end - first) * size_ * profile.codec_seconds_per_byte.get(format, 0.0)
            coding += (end - first) * entry * profile.transfer_seconds_per_byte
        if after:
            size_ = profile.layers[stage.stop - 1].output_bytes
            exit_ = size_ * FORMATS[stage.send]
            coding += (end - first) * size_ * profile.codec_seconds_per_byte.get(stage.send, 0.0)
            coding += (end - first) * exit_ * profile.transfer_seconds_per_byte
        made[size] = {
            "forward": (forward + coding, len(before), tuple((peer, exit_ * count) for peer, count in after)),
            "backward": (backward + coding, len(after), tuple((peer, entry * count) for peer, count in before)),
        }
    return [_Task(action, *made[sizes[action.micro]][action.kind]) for action in actions if sizes[action.micro] in made]


def _overlaps(own: tuple[int, int], rows: list[tuple[int, int]], ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The ranks with which a rank shares rows, and how many; `rows` are consecutive."""
    place = bisect.bisect_right(rows, own[0], key=lambda part: part[1])
    found = []
    while place < len(rows) and rows[place][0] < own[1]:
        shared = min(own[1], rows[place][1]) - max(own[0], rows[place][0])
        if shared > 0:
            found.append((ranks[place], shared))
        place += 1
    return found


def _memory(
    plan: Plan, profile: Profile, number: int, rows: tuple[int, int], sizes: list[int], optimizer_copies: int
) -> float:
    stage = plan.stages[number]
    layers = profile.layers[stage.start : stage.stop]
    parameters = sum(layer.parameter_bytes for layer in layers)
    held = most_held(plan.actions(stage.ranks[0], len(sizes)), number)
    activations = held * (rows[1] - rows[0]) * sum(layer.saved_bytes for layer in layers)
    buckets = 1 if len(stage.ranks) > 1 else 0
    return float(parameters * (2 + optimizer_copies + buckets) + activations)
