"""Predicts a plan's step time and memory from a profile, without a process group.

A discrete-event simulation of the schedule: each rank works through its actions in order, an action waits for the
tensors it needs, and ranks that share a machine share its cores. It covers what closed formulas such as Asteroid's
(MobiCom 2024, section 4) leave out: uneven stages, few micro-batches, and more ranks than cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horizonml.plan.plan import Plan
from horizonml.plan.profile import Profile
from horizonml.plan.schedule import SCHEDULES, Action, in_flight


@dataclass(frozen=True)
class Host:
    """A machine: the ranks on it, its cores, and the memory that each of its ranks may use, in bytes."""

    ranks: tuple[int, ...]
    cores: float
    memory: float


@dataclass(frozen=True)
class Network:
    """Between two ranks: latency in seconds, bandwidth in bytes per second."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Prediction:
    """What a plan would cost."""

    seconds: float  # of a step
    memory: dict[int, float]  # bytes of parameters, gradients, optimizer state and activations, by rank
    fits: bool


def predict(
    plan: Plan, profile: Profile, batch_size: int, hosts: Sequence[Host], network: Network, optimizer_copies: int
) -> Prediction:
    """Step time and memory of a plan. `optimizer_copies` is 1 for momentum SGD, 2 for Adam, 0 for plain SGD."""
    sizes = plan.micro_sizes(batch_size, batch_size)
    tasks = {rank: _tasks(plan, profile, rank, sizes) for stage in plan.stages for rank in stage.ranks}
    finish = _run(plan, tasks, sizes, profile, hosts, network)
    seconds = max(finish[rank] + _after(plan, profile, rank, network, hosts) for rank in finish)
    memory = {rank: _memory(plan, profile, rank, sizes, optimizer_copies) for rank in tasks}
    capacity = {rank: host.memory for host in hosts for rank in host.ranks}
    return Prediction(seconds, memory, all(memory[rank] <= capacity[rank] for rank in memory))


@dataclass(frozen=True)
class _Task:
    action: Action
    work: float  # seconds on a core of its own


def _tasks(plan: Plan, profile: Profile, rank: int, sizes: list[int]) -> list[_Task]:
    number, member = plan.stage_of(rank), plan.member_of(rank)
    stage = plan.stages[number]
    tasks = []
    for action in SCHEDULES[plan.schedule](number, len(plan.stages), len(sizes)):
        first, end = stage.rows(sizes[action.micro])[member]
        if end > first:
            times = [profile.seconds(layer, end - first) for layer in range(stage.start, stage.stop)]
            tasks.append(_Task(action, sum(time[action.kind == "backward"] for time in times)))
    return tasks


def _run(
    plan: Plan,
    tasks: dict[int, list[_Task]],
    sizes: list[int],
    profile: Profile,
    hosts: Sequence[Host],
    network: Network,
) -> dict[int, float]:
    """When each rank has finished its last action."""
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host.ranks}
    done: dict[tuple[str, int, int], float] = {}  # (kind, stage, micro) -> when its slowest member was through
    members_left = {
        (kind, number, micro): sum(end > first for first, end in stage.rows(size))
        for number, stage in enumerate(plan.stages)
        for micro, size in enumerate(sizes)
        for kind in ("forward", "backward")
    }
    stage_of = {rank: plan.stage_of(rank) for rank in tasks}
    position = dict.fromkeys(tasks, 0)
    running: dict[int, float] = {}  # rank -> work left
    ready_at: dict[int, float | None] = dict.fromkeys(tasks)
    finish = dict.fromkeys(tasks, 0.0)
    now = 0.0

    def arrival(rank: int) -> float | None:
        """When the input of the rank's next action is there; None while that is not known."""
        action, number = tasks[rank][position[rank]].action, stage_of[rank]
        if action.kind == "forward":
            if number == 0:
                return 0.0
            needed, boundary = ("forward", number - 1, action.micro), plan.stages[number].start - 1
        else:
            if number == len(plan.stages) - 1:
                return 0.0
            needed, boundary = ("backward", number + 1, action.micro), plan.stages[number].stop - 1
        if needed not in done:
            return None
        size = profile.layers[boundary].output_bytes * sizes[action.micro]
        return done[needed] + network.latency + size / network.bandwidth

    while any(position[rank] < len(tasks[rank]) for rank in tasks):
        for rank in tasks:
            if rank not in running and position[rank] < len(tasks[rank]):
                ready_at[rank] = arrival(rank)
                at = ready_at[rank]
                if at is not None and at <= now + 1e-12:
                    running[rank] = tasks[rank][position[rank]].work
        busy: dict[int, int] = {}
        for rank in running:
            busy[host_of[rank]] = busy.get(host_of[rank], 0) + 1
        speed = {rank: min(1.0, hosts[host_of[rank]].cores / busy[host_of[rank]]) for rank in running}
        waits = [at - now for rank, at in ready_at.items() if rank not in running and at is not None and at > now]
        ends = [left / speed[rank] for rank, left in running.items()]
        assert ends or waits, "the schedule cannot go on"
        step = min([*ends, *waits])
        now += step
        for rank in list(running):
            running[rank] -= step * speed[rank]
            if running[rank] <= 1e-12:
                del running[rank]
                key = (
                    tasks[rank][position[rank]].action.kind,
                    stage_of[rank],
                    tasks[rank][position[rank]].action.micro,
                )
                members_left[key] -= 1
                if not members_left[key]:
                    done[key] = now
                position[rank] += 1
                ready_at[rank] = None
                finish[rank] = now
    return finish


def _after(plan: Plan, profile: Profile, rank: int, network: Network, hosts: Sequence[Host]) -> float:
    """Seconds for the sum of gradients in the rank's stage, and the update."""
    stage = plan.stages[plan.stage_of(rank)]
    size = sum(profile.layers[layer].parameter_bytes for layer in range(stage.start, stage.stop))
    members = len(stage.ranks)
    host = next(host for host in hosts if rank in host.ranks)
    crowd = max(1.0, len(host.ranks) / host.cores)
    reduce = 2 * (members - 1) * (network.latency + size / members / network.bandwidth)
    return (
        (reduce + size * profile.update_seconds_per_byte) * crowd
        if members > 1
        else (size * profile.update_seconds_per_byte * crowd)
    )


def _memory(plan: Plan, profile: Profile, rank: int, sizes: list[int], optimizer_copies: int) -> float:
    number = plan.stage_of(rank)
    stage = plan.stages[number]
    layers = profile.layers[stage.start : stage.stop]
    parameters = sum(layer.parameter_bytes for layer in layers)
    first, end = stage.rows(max(sizes))[plan.member_of(rank)]
    held = in_flight(plan.schedule, number, len(plan.stages), len(sizes))
    activations = held * (end - first) * sum(layer.saved_bytes for layer in layers)
    buckets = 1 if len(stage.ranks) > 1 else 0
    return float(parameters * (2 + optimizer_copies + buckets) + activations)
