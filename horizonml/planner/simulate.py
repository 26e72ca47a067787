"""Predicts a plan's step time and memory from profiles, without a process group.

The prediction is a discrete-event simulation of the action lists that the engine runs: each rank works through its
actions in order, an action waits for the tensors it needs, the messages of a rank go over its link one after the other,
and ranks that share a machine share its cores. The simulation covers what closed formulas such as Asteroid's (MobiCom
2024, section 4) leave out: uneven stages and shares, few micro-batches, busy links, and more ranks than cores. A step
with local steps is an average one: none of its sums is waited for, and what they cost is divided among the steps.

Three things slow down ranks that compute at once on a machine, and all of them were measured:

- They fill the caches and the memory's bandwidth for one another. `Host.contention` has the factor.
- Where they outnumber the cores, some share one. The kernel keeps a thread on its core, and moves it only to a core
  that has become idle; so for hundreds of milliseconds, of five ranks on four cores two have half a core, and three
  have a whole one. The step waits for the slow ones.
- A quota stops its container once the allowance is used up.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from horizonml.plan.plan import Plan
from horizonml.plan.schedules import Kind
from horizonml.planner.cost import (
    LastBackward,
    LayerTimes,
    Ring,
    coding_seconds,
    memory_needed,
    outer_cost,
    reduced_at,
    synced_bytes,
    trained_bytes,
)
from horizonml.planner.problem import Problem
from horizonml.planner.profile import Contention, Host, slowdown
from horizonml.planner.tasks import LAST_PASSES, SimulatedTask, TaskMaker

_FROM = {Kind.FORWARD: True, Kind.BACKWARD: False, Kind.BACKWARD_INPUT: False}  # whether messages go to later stages
_NOBODY = -1  # the machine number of an event that is not about cores

_Arrival = tuple[int, bool, int, int]  # receiving rank, whether from the stage before, stage, micro-batch


class WorkSpan(NamedTuple):
    """Describes the time from `begin` to `end`, in seconds of a step, in which a rank computes an action."""

    rank: int
    kind: Kind
    stage: int
    micro: int
    begin: float
    end: float


class Transfer(NamedTuple):
    """Describes a message between two ranks that travels from `begin` to `end`."""

    sender: int
    receiver: int
    begin: float
    end: float


@dataclass(frozen=True)
class Prediction:
    """Holds what a plan is predicted to cost."""

    seconds: float  # of a step
    parts: dict[str, float]  # what the seconds of the last rank to finish consist of
    memory: dict[int, float]  # bytes of parameters, gradients, optimizer state, activations and samples, by rank
    lacking: dict[int, float]  # bytes that are lacking, by rank; empty if the plan fits
    busy: dict[int, float]  # seconds of a step in which a rank computes on a core of its own
    computing: dict[int, float]  # seconds of a step in which it computes, perhaps on a core that it has to share
    working: dict[int, float]  # and those in which it sends or receives, too; empty where no device's watts are known
    spans: list[WorkSpan]  # empty if the timeline was not asked for
    messages: list[Transfer]  # likewise

    @property
    def fits(self) -> bool:
        """Return whether every rank has the memory that it needs."""
        return not self.lacking


def predict(problem: Problem, plan: Plan, times: LayerTimes | None = None, timeline: bool = True) -> Prediction:
    """Return the step time and the memory of a plan.

    `times` are those of the problem's profiles, if known. Without a `timeline` the prediction takes little memory.
    """
    maker = TaskMaker(problem, plan, times or LayerTimes(problem.profiles))
    tasks = maker.tasks()
    simulation = _Simulation(problem, plan, tasks, [0.0] * len(problem.hosts))
    seconds = simulation.run()
    if any(host.cores < 1 for host in problem.hosts):  # what a step leaves of a quota is available to the next one
        simulation = _Simulation(problem, plan, tasks, simulation.allowances(seconds))
        seconds = simulation.run()
    idle = dict.fromkeys(plan.spare, 0.0)
    memory = {**memory_needed(problem, plan, maker.actions), **idle}
    capacity, parts, outer = problem.memory, simulation.parts(), 0.0
    if plan.local is not None:
        outer = sum(outer_cost(problem, plan, seconds))
        seconds, parts = seconds + outer, {**parts, "agreeing on local steps": outer}
    computing = dict.fromkeys([*tasks, *idle], 0.0)
    for span in simulation.spans:
        computing[span.rank] += span.end - span.begin
    covered = _working(problem, plan, simulation) if problem.watts else {}
    return Prediction(
        seconds,
        parts,
        memory,
        {rank: need - capacity[rank] for rank, need in memory.items() if need > capacity[rank] and rank not in idle},
        {**{rank: sum(task.work for task in own) for rank, own in tasks.items()}, **idle},
        computing,
        {rank: min(seconds, own + outer) for rank, own in covered.items()} | (idle if covered else {}),
        simulation.spans if timeline else [],
        simulation.messages if timeline else [],
    )


def _working(problem: Problem, plan: Plan, simulation: _Simulation) -> dict[int, float]:
    """Return the seconds of a step in which each rank computes, sends or receives; what overlaps counts once."""
    spans: dict[int, list[tuple[float, float]]] = {rank: [] for stage in plan.stages for rank in stage.ranks}
    for span in simulation.spans:
        spans[span.rank].append((span.begin, span.end))
    for message in simulation.messages:
        for rank in (message.sender, message.receiver):
            spans[rank].append((message.begin, message.end))
    for number, done in simulation.reduced.items():
        stage = plan.stages[number]
        size = synced_bytes(problem, stage.sync, stage.start, stage.stop)
        takes = Ring(problem, stage.ranks).seconds(size)
        takes += coding_seconds(problem, stage.sync, stage.ranks, trained_bytes(problem.profiles[0], stage))
        for rank in stage.ranks:
            spans[rank].append((max(0.0, done - takes), done))
    return {rank: _covered(own) for rank, own in spans.items()}


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return how much time the spans cover together."""
    total = reached = 0.0
    for begin, end in sorted(spans):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total


class _Simulation:
    """Simulates one step of a plan."""

    def __init__(
        self, problem: Problem, plan: Plan, tasks: dict[int, list[SimulatedTask]], allowances: Sequence[float]
    ) -> None:
        self.spans: list[WorkSpan] = []
        self.messages: list[Transfer] = []
        self._problem, self._plan, self._tasks = problem, plan, tasks
        self._cores = cores_of(problem.hosts, problem.cores, allowances)
        self._machines = {cores.machine.number: cores.machine for cores in self._cores}
        self._changed: dict[int, Machine] = {}  # machines on which a rank has begun or ended since the last event
        self._host_of = {rank: self._cores[number] for number, host in enumerate(problem.hosts) for rank in host.ranks}
        self._position = dict.fromkeys(tasks, 0)
        self._arrived: dict[_Arrival, int] = {}
        self._link_free = dict.fromkeys(tasks, 0.0)
        self._ring_free = dict.fromkeys(tasks, 0.0)
        self._began: dict[int, float] = {}
        self._last: dict[tuple[int, int], LastBackward] = {}  # by rank and stage
        self._passed = dict.fromkeys(tasks, 0.0)  # when each rank has done its last pass
        self.reduced: dict[int, float] = {}  # when each stage's gradients are summed
        self._came: dict[int, int] = {}  # members that wait for the sum, by stage
        self._finish = dict.fromkeys(tasks, 0.0)
        self._events: list[tuple[float, int, int, int, _Arrival | None]] = []
        self._count = 0

    def run(self) -> float:
        """Return when the last rank has finished its last action."""
        for rank in self._tasks:
            self._try(rank, 0.0)
        self._schedule()
        while self._events:
            now, _, number, version, arrival = heapq.heappop(self._events)
            if arrival is not None:
                self._arrived[arrival] = self._arrived.get(arrival, 0) + 1
                self._try(arrival[0], now)
            elif number == _NOBODY:
                self._release(version, now)
            elif self._machines[number].version == version:
                self._advance(self._machines[number], now)
            if self._changed:
                self._schedule()
        done = all(self._position[rank] == len(tasks) for rank, tasks in self._tasks.items())
        assert done, f"the schedule {self._plan.schedule} waits for itself"
        return max(self._finish.values())

    def parts(self) -> dict[str, float]:
        """Return what the time of the last rank to finish consists of, in order; the seconds add up."""
        last = max(self._finish, key=lambda rank: self._finish[rank])
        own = [self._plan.stages[number] for number in self._plan.stages_of(last)]
        end = self._finish[last]
        passed = min(end, max(self._passed[rank] for stage in own for rank in stage.ranks))
        reduced = max([passed, *(self.reduced.get(number, 0.0) for number in self._plan.stages_of(last))])
        return {
            "forward and backward passes": passed,
            "summing gradients": reduced - passed,
            "updating parameters": end - reduced,
        }

    def allowances(self, now: float) -> list[float]:
        """Return the machines' allowances at a time after the last action."""
        for cores in self._cores:
            cores.machine.advance(now)
        return [cores.allowance for cores in self._cores]

    def _advance(self, machine: Machine, now: float) -> None:
        """Complete the actions that have ended on a machine."""
        if machine.dedicated:
            rank, _ = machine.hosts[0].left.popitem()
            self._complete(rank, now)
            return
        machine.advance(now)
        for rank in machine.end():
            self._complete(rank, now)
        machine.balance()
        self._changed[machine.number] = machine

    def _complete(self, rank: int, now: float) -> None:
        task, began = self._tasks[rank][self._position[rank]], self._began.pop(rank)
        action = task.action
        self.spans.append(WorkSpan(rank, action.kind, action.stage, action.micro, began, now))
        self._finish[rank] = now
        if action.kind is not Kind.UPDATE:
            self._passed[rank] = now
        if action.kind in LAST_PASSES:
            self._last[rank, action.stage] = LastBackward(began, now)
        self._position[rank] += 1
        for peer, size in task.sends:
            arrival = (peer, _FROM[action.kind], task.receiver, action.micro)
            if peer == rank:
                self._arrived[arrival] = self._arrived.get(arrival, 0) + 1
                continue
            latency, bandwidth = self._problem.network.between(rank, peer)
            begin = max(now, self._link_free[rank])
            free = begin + size / bandwidth
            self._link_free[rank] = free
            self.messages.append(Transfer(rank, peer, begin, free + latency))
            self._push(free + latency, 0, 0, arrival)
        self._try(rank, now)

    def _try(self, rank: int, now: float) -> None:
        """Begin the rank's next action if the rank is idle and everything for the action has arrived."""
        position = self._position[rank]
        if rank in self._began or position == len(self._tasks[rank]):
            return
        task = self._tasks[rank][position]
        action = task.action
        if action.kind is Kind.REDUCE:
            self._began[rank] = now
            self._come(action.stage)
            return
        if task.inputs:
            forward = action.kind is Kind.FORWARD
            if self._arrived.get((rank, forward, action.stage, action.micro), 0) < task.inputs:
                return
        self._began[rank] = now
        cores = self._host_of[rank]
        machine = cores.machine
        if machine.dedicated:  # nothing can slow it down, so its work need not be followed
            cores.left[rank] = 0.0
            self._push(now + task.work, machine.number, machine.version)
            return
        machine.advance(now)
        machine.begin(cores, rank, task.work)
        self._changed[machine.number] = machine

    def _come(self, number: int) -> None:
        """Note that a member waits for its stage's sum, whose end is known once all members wait for it."""
        stage = self._plan.stages[number]
        self._came[number] = self._came.get(number, 0) + 1
        if self._came[number] == len(stage.ranks):
            last = [self._last.get((rank, number), LastBackward()) for rank in stage.ranks]
            done = reduced_at(self._problem, stage, last, max(self._ring_free[rank] for rank in stage.ranks))
            self._ring_free.update(dict.fromkeys(stage.ranks, done))
            self._push(max(done, *(self._began[rank] for rank in stage.ranks)), _NOBODY, number)

    def _release(self, number: int, now: float) -> None:
        """Let the members of a stage go on once its gradients are summed."""
        self.reduced[number] = now
        for rank in self._plan.stages[number].ranks:
            del self._began[rank]
            self._finish[rank] = now
            self._position[rank] += 1
            self._try(rank, now)

    def _schedule(self) -> None:
        """Schedule the next time at which a rank's speed changes on the machines that an event has changed."""
        for machine in self._changed.values():
            machine.version += 1
            after = machine.next_change
            if after < math.inf:
                self._push(machine.now + after, machine.number, machine.version)
        self._changed.clear()

    def _push(self, at: float, number: int, version: int, arrival: _Arrival | None = None) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, number, version, arrival))


_EPSILON = 1e-12
_QUOTA_PERIOD = 0.1  # seconds; the default of Linux, Docker and Kubernetes
_RESUMES = 0.1  # of what a period grants: the allowance at which a container that has used up its own bursts again


@dataclass
class Cores:
    """Models the cores that a host may use, its ranks that compute now, and the work that each has left.

    A host with less than one core has a quota: its container may use a whole core until its allowance is used up. The
    allowance grows continuously, but never beyond what one period of the quota grants. Once it is used up, the
    container uses a whole core again only when some of it has grown, or hosts that share a core would alternate
    without end.
    """

    cores: float
    machine: Machine
    allowance: float = 0.0  # seconds of a core
    bursts: bool = False  # whether it may use a whole core
    left: dict[int, float] = field(default_factory=dict)  # seconds on a core of its own, by rank
    steady: bool = False  # whether it never uses more than its cores

    @property
    def demand(self) -> float:
        """Return the part of a core that each of the host's ranks would use now if it had one to itself."""
        limit = 1.0 if self.bursts else self.cores
        return min(1.0, limit / len(self.left)) if self.left and not self.machine.whole(self) else 1.0

    def accrue(self, seconds: float) -> bool:
        """Let the allowance grow, or shrink, by so much, and return whether it matters for how fast ranks compute."""
        granted, before = 0.0 if self.steady else self.cores * _QUOTA_PERIOD, self.bursts
        grown = self.allowance + seconds
        self.allowance = min(granted, grown) if grown > _EPSILON else 0.0
        self.bursts = self.allowance > 0 and (before or self.allowance >= _RESUMES * granted)
        return self.bursts != before


class Rate(NamedTuple):
    """Says how fast a rank computes: the part of a core that it uses, and the work that it does with it a second."""

    used: float
    speed: float


@dataclass
class Machine:
    """Describes a physical machine, the hosts on it, and which of its cores their ranks compute on."""

    number: int
    cores: float
    contention: Contention = ()
    dedicated: bool = False  # to a single rank, which always computes at full speed
    version: int = 0  # counts changes of speed, so that outdated forecasts can be recognised
    hosts: list[Cores] = field(default_factory=list)
    now: float = 0.0
    _place: dict[int, int] = field(default_factory=dict)  # the core that each rank computes on
    _rates: dict[int, Rate] | None = None

    def whole(self, host: Cores) -> bool:
        """Return whether a host is the whole machine, so that nothing but its cores limits its ranks."""
        return len(self.hosts) == 1 and host.cores >= 1 and self.cores == int(self.cores)

    @property
    def rates(self) -> dict[int, Rate]:
        """Return how fast each rank computes now."""
        if self._rates is None:
            wanted = {rank: host.demand for host in self.hosts for rank in host.left}
            total = sum(wanted.values())
            slow = slowdown(self.contention, total)
            load = [0.0] * int(self.cores)
            for rank, part in wanted.items():
                load[self._place[rank]] += part
            self._rates = {}
            for rank, part in wanted.items():
                share = 1 / max(1.0, load[self._place[rank]])
                self._rates[rank] = Rate(part * share, part * share / slow)
        return self._rates

    @property
    def next_change(self) -> float:
        """Return the seconds until the first rank finishes, or an allowance is used up; infinite if none computes."""
        rates, soonest = self.rates, math.inf
        for host in self.hosts:
            used = 0.0
            for rank, left in host.left.items():
                rate = rates[rank]
                used += rate.used
                soonest = min(soonest, left / rate.speed)
            if host.bursts and used > host.cores:
                soonest = min(soonest, host.allowance / (used - host.cores))
        return soonest

    def begin(self, host: Cores, rank: int, work: float) -> None:
        """Let a rank begin to compute, on an idle core if there is one, or else beside the fewest others."""
        counts = self._counts()
        fewest = min(counts)
        before = self._place.get(rank)
        if before is None or counts[before] > fewest:
            self._place[rank] = counts.index(fewest)
        host.left[rank] = work
        self._rates = None

    def end(self) -> list[int]:
        """Let the ranks that have nothing left stop, and return them; who begins again at once keeps its core."""
        least, ended = _EPSILON + 1e-9 * self.now, []
        for host in self.hosts:
            own = [rank for rank, left in host.left.items() if left <= least]
            for rank in own:
                del host.left[rank]
            ended += own
        if ended:
            self._rates = None
        return ended

    def balance(self) -> None:
        """Let cores that have become idle take over ranks that share others."""
        counts = self._counts()
        while 0 in counts and max(counts) > 1:
            idle, busiest = counts.index(0), counts.index(max(counts))
            self._place[next(r for h in self.hosts for r in h.left if self._place[r] == busiest)] = idle
            counts[idle], counts[busiest] = 1, counts[busiest] - 1
            self._rates = None

    def _counts(self) -> list[int]:
        """Return how many ranks compute on each core."""
        counts = [0] * int(self.cores)
        for host in self.hosts:
            for rank in host.left:
                counts[self._place[rank]] += 1
        return counts

    def advance(self, now: float) -> None:
        """Let all hosts work until the time `now`."""
        passed = now - self.now
        if passed <= 0:
            return
        rates = self.rates
        for host in self.hosts:
            used = 0.0
            for rank in host.left:
                host.left[rank] -= passed * rates[rank].speed
                used += rates[rank].used
            if host.cores < 1 and host.accrue(passed * (host.cores - used)):
                self._rates = None
        self.now = now


def cores_of(hosts: Sequence[Host], left: Sequence[float], allowances: Sequence[float]) -> list[Cores]:
    """Return the hosts at the beginning of a step; hosts that name the same machine share its cores.

    `left[h]` are the cores of host h that training may use.
    """
    machines: dict[str, Machine] = {}
    made = []
    for number, (host, cores, allowance) in enumerate(zip(hosts, left, allowances, strict=True)):
        if host.machine:
            machine = machines.setdefault(host.machine, Machine(number, max(1.0, host.machine_cores), host.contention))
        else:
            dedicated = len(host.ranks) == 1 and host.cores >= 1
            machine = Machine(number, max(1.0, host.cores), host.contention, dedicated)
        made.append(Cores(cores, machine, steady=not host.bursts))
        if host.cores < 1:
            made[-1].accrue(allowance)
        machine.hosts.append(made[-1])
    return made
