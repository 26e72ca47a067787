"""Measures the links between the ranks of a group, and how ranks of one machine slow one another down.

Ranks of one machine share the caches and the memory's bandwidth, whatever their containers' quotas are. So a rank of
each machine trains the model, or as many layers as there is room for, first alone and then beside more and more of the
others, and compares the processor time that this takes. Waiting for a core is not in that: the planner simulates it.
Layers that wait for something else, such as a disk, do not wait longer for it: only the time in which they compute
grows. Single layers would not do, because what they leave behind is still in the caches when they need it again.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter, process_time, sleep
from types import MappingProxyType

import torch

from horizonml.comm.expected import boolean, fields, items, number, optional, whole
from horizonml.comm.group import Group
from horizonml.engine.execution import backward
from horizonml.errors import PeerLost
from horizonml.machine.accelerator import computing
from horizonml.machine.host import processor_name
from horizonml.models.boundary import flat
from horizonml.models.zoo import Model
from horizonml.planner.profile import Contention, Host, Network
from horizonml.profiling import kept
from horizonml.profiling.kept import is_settled
from horizonml.profiling.measure import has_quota

_PROBE_BYTES = 256 << 10
_SLOW_SECONDS, _VERY_SLOW_SECONDS = 5e-3, 5e-2
_SLOWEST_SECONDS = 0.5  # what takes longer is looked at once: no other program holds up a message for so long
_MOST_LOOKS = 3
_PAUSE_SECONDS = 0.12  # between two looks: longer than the period of a quota
_WAIT_SECONDS = 0.5  # in which a process does most of what it does now and then
MOST_PROBED = 16  # up to this number of ranks, every pair is probed


def tournament(players: int) -> list[list[tuple[int, int]]]:
    """Return rounds in which every pair meets once, and no rank is in two pairs of a round (the circle method)."""
    seats = [*range(players), *([-1] if players % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


@dataclass(frozen=True)
class ProcessCost:
    """Holds what a rank's process takes of a processor besides the layers, in seconds."""

    message: float = 0.0  # for each message
    byte: float = 0.0  # for each byte of one
    crossing: float = 0.0  # for each byte to or from another machine, beyond that: for encryption, and to be carried
    waiting: float = 0.0  # for each second, whatever it does: for heartbeats, metrics and the like


def probe_pairs(group: Group) -> tuple[Network, list[ProcessCost]]:
    """Return the latency and bandwidth between every two ranks, and what their processes take besides the layers.

    Pairs are probed in rounds in which no rank takes part twice.
    """
    found: dict[int, tuple[float, float]] = {}
    waiting, tunnel = _waiting(group)
    begin, before = perf_counter(), _carried(group)
    small, large = _Usage(), _Usage()
    for pairs in tournament(group.world_size):
        for pair in pairs:
            if group.rank in pair:
                peer = pair[0] + pair[1] - group.rank
                found[peer] = _probe(group, peer, small, large)
        group.barrier()  # separates the rounds
    message = small.seconds / max(1, small.messages)
    byte = max(0.0, large.seconds - large.messages * message) / max(1, large.moved)
    passed, after = perf_counter() - begin, _carried(group)
    crossing = _crossing(after[0] - before[0] - tunnel * passed, after[1] - before[1])
    own = [message, byte, crossing, waiting + tunnel if has_quota() else 0.0]
    everyone = group.gather_json(
        [[[peer, *link] for peer, link in found.items()], *own],
        fields(items(fields(whole(0, group.world_size - 1), number, number)), number, number, number, number),
    )
    pairs_ = {
        (rank, peer): (latency, bandwidth)
        for rank, (links, *_) in enumerate(everyone)
        for peer, latency, bandwidth in links
    }
    latency, bandwidth = max(link[0] for link in pairs_.values()), min(link[1] for link in pairs_.values())
    costs = [ProcessCost(*own) for _, *own in everyone]
    return Network(latency, bandwidth, pairs=pairs_), [
        replace(cost, crossing=max(one.crossing for one, host in zip(costs, group.hosts, strict=True) if host == own))
        for cost, own in zip(costs, group.hosts, strict=True)
    ]


def _waiting(group: Group) -> tuple[float, float]:
    """Return which parts of a core this process and its tunnel use while they wait, or 0 where that hardly matters."""
    if not has_quota() and group.links is None:
        return 0.0, 0.0
    used, begin, before = process_time(), perf_counter(), _carried(group)[0]
    sleep(_WAIT_SECONDS)
    passed = perf_counter() - begin
    return (process_time() - used) / passed, (_carried(group)[0] - before) / passed


def _carried(group: Group) -> tuple[float, int]:
    """Return the processor's seconds that this rank's tunnel has taken so far, and the bytes that it has carried."""
    if group.links is None:
        return 0.0, 0
    usage = group.links.tunnel.usage()
    return usage.seconds, usage.sent + usage.received


def _crossing(seconds: float, moved: int) -> float:
    """Return the processor's seconds for each byte that a tunnel has carried, 0 if it has carried too few to tell.

    One rank's tunnel may carry what comes to all ranks of its machine.
    """
    return max(0.0, seconds) / moved if moved >= _PROBE_BYTES else 0.0


def probe_network(group: Group) -> Network:
    """Return the slowest connection between neighbouring ranks.

    The ranks exchange a small and a larger message with one neighbour in the first round, and with the other in the
    second.
    """
    found = [1e-5, 1e12]
    for first in (0, 1):
        place = group.rank - first
        peer = group.rank + 1 if place % 2 == 0 else group.rank - 1
        if 0 <= peer < group.world_size and place >= 0:
            latency, bandwidth = _probe(group, peer, _Usage(), _Usage())
            found = [max(found[0], latency), min(found[1], bandwidth)]
        group.barrier()  # separates the rounds
    everyone = group.gather_json(found, fields(number, number))
    return Network(max(latency for latency, _ in everyone), min(bandwidth for _, bandwidth in everyone))


@dataclass
class _Usage:
    """Counts messages sent and received, their bytes, and the processor time that they took."""

    seconds: float = 0.0
    messages: int = 0
    moved: int = 0


def _probe(group: Group, peer: int, small: _Usage, large: _Usage) -> tuple[float, float]:
    """Return the latency and the bandwidth of the link to another rank, which calls this at the same time.

    A processor that other programs use, or that has used up its quota, makes a link look slow for a moment. So a link
    that looks slow, or whose times differ, is looked at again after a pause, and the best times count.
    """
    latency, times = math.inf, list[float]()
    for look in range(_MOST_LOOKS):
        if look:
            sleep(_PAUSE_SECONDS)
        latency = min(latency, *_exchange(group, peer, 4, 8, small))
        times += _exchange(group, peer, _PROBE_BYTES, 2, large)
        # Both ranks measure about the same, but must decide alike.
        least = min(times)
        is_doubtful = least < _SLOWEST_SECONDS and (least > _SLOW_SECONDS or not is_settled(times))
        if not any(_both(group, peer, float(is_doubtful))):
            break
    size, seconds = _PROBE_BYTES, max(1e-6, *_both(group, peer, least))
    if seconds > _SLOW_SECONDS:  # traffic shapers let a burst pass; more data shows the true speed
        size *= 4
        seconds = min(_exchange(group, peer, size, 3 if seconds < _VERY_SLOW_SECONDS else 2, large))
    return max(1e-6, latency), size / seconds


def _both(group: Group, peer: int, own: float) -> tuple[float, float]:
    """Return a number of this rank, and that of another one that calls this at the same time."""
    sent, received = torch.tensor([own], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    tag = group.channel("probe").tag()
    works = [group.receive(received, peer, tag), group.send(sent, peer, tag)]
    for work in works:
        group.wait(work, peer)
    return own, float(received)


def _exchange(group: Group, peer: int, size: int, times: int, usage: _Usage) -> list[float]:
    """Return the seconds of each of so many exchanges of `size` bytes one way, while as many travel the other way."""
    sent, received = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    found, used = list[float](), process_time()
    for _ in range(times):
        start = perf_counter()
        tag = group.channel("probe").tag()
        works = [group.receive(received, peer, tag), group.send(sent, peer, tag)]
        for work in works:
            group.wait(work, peer)
        found.append(perf_counter() - start)
    usage.seconds += process_time() - used
    usage.messages += 2 * times
    usage.moved += 2 * times * size
    return found


_FORMAT = 4
_ROWS = 64  # of a micro-batch, at most
_MOST_BYTES = 128 << 20  # of the parameters of the layers that are trained
_LOOPS = 2  # in which every rank of a level trains them once each
_ROUNDS, _MOST_ROUNDS = 2, 4  # of measurements; more than the first ones while they contradict themselves
_CHANCE = 0.05  # by which factors may contradict themselves
_LEAST_SECONDS, _MOST_SECONDS = 0.05, 2.0  # of a level, whatever the quotas are
_MOST_LEVELS = 6
_MOST_FACTOR = 20.0  # more than that is no contention

_read_curve = optional(items(fields(number, number)))


def crowds(hosts: Sequence[Host]) -> list[list[int]]:
    """Return the ranks of each machine that has several of them."""
    found: dict[str, list[int]] = {}
    for place, host in enumerate(hosts):
        found.setdefault(host.machine or f" {place}", []).extend(host.ranks)
    return [ranks for ranks in found.values() if len(ranks) > 1]


def turns(hosts: Sequence[Host]) -> list[list[int]]:
    """Return which ranks measure their devices at once: the first of each host, one host of each machine at a time."""
    found: list[list[int]] = []
    before: Counter[str] = Counter()
    for place, host in enumerate(hosts):
        name = host.machine or f" {place}"
        if before[name] == len(found):
            found.append([])
        found[before[name]].append(host.ranks[0])
        before[name] += 1
    return found


def levels(ranks: int) -> list[int]:
    """Return how many of a machine's ranks compute at once in each measurement: 1, all, and some numbers between."""
    between = set(range(2, ranks))
    if len(between) > _MOST_LEVELS - 2:
        steps = _MOST_LEVELS - 1
        between = {round(1 + (ranks - 1) * step / steps) for step in range(1, steps)}
    return sorted({1, *between, ranks})


def measure_contention(group: Group, hosts: Sequence[Host], model: Model, batch_size: int) -> list[Contention]:
    """Return the contention on each rank's machine, empty where a rank is alone; all ranks of the group call this."""
    found: list[Contention] = [()] * group.world_size
    # Ranks on accelerators do not compute with the cores of their machine.
    with_cores = group.gather_json(not computing().accelerates, boolean)
    machines = [ranks for ranks in crowds(hosts) if all(with_cores[rank] for rank in ranks)]
    if not machines:
        return found
    own = next((ranks for ranks in machines if group.rank in ranks), [])
    cores = {rank: host.demand for host in hosts for rank in host.ranks}
    rows = max(2, min(_ROWS, batch_size // group.world_size))
    key = _key(model, rows, [cores[rank] for rank in own])
    leads = [ranks[0] for ranks in machines]
    curves = group.gather_json(_read(key) if group.rank in leads else None, _read_curve)
    if any(curves[lead] is None for lead in leads):
        measured, times = _measure(group, machines, own, cores, model, rows)
        if group.rank in leads and not is_doubtful(measured, times):  # or it is used this once
            kept.write("contention", key, {"points": measured, "seconds": times})
        curves = group.gather_json(measured if group.rank in leads else None, _read_curve)
    for ranks in machines:
        points = curves[ranks[0]]
        if points is None:
            raise PeerLost(f"rank {ranks[0]} did not send what it has measured")
        curve: Contention = ()
        for one, factor in sorted(points):  # more ranks cannot make it better, so what looks like that is noise
            curve += ((one, min(_MOST_FACTOR, max(curve[-1][1] if curve else 1.0, factor))),)
        for rank in ranks:
            found[rank] = curve
    return found


def with_contention(hosts: Sequence[Host], found: Sequence[Contention]) -> list[Host]:
    """Return the hosts with what was measured for their ranks."""
    return [replace(host, contention=found[host.ranks[0]]) for host in hosts]


def is_doubtful(points: Sequence[Sequence[float]], times: Mapping[int, Sequence[float]] = MappingProxyType({})) -> bool:
    """Return whether a curve of cores and factors says that work gets faster while more ranks compute.

    That is impossible: whatever it is compared with was measured while other programs ran. So is a curve whose `times`,
    those of each number of ranks, differ from round to round.
    """
    factors = [1.0, *(factor for _, factor in sorted(map(tuple, points)))]
    falls = any(factor < (1 - _CHANCE) * before for before, factor in itertools.pairwise(factors))
    return falls or not all(kept.is_settled(found) for found in times.values() if found)


def _measure(
    group: Group,
    machines: Sequence[Sequence[int]],
    own: Sequence[int],
    cores: dict[int, float],
    model: Model,
    rows: int,
) -> tuple[list[list[float]], dict[int, list[float]]]:
    """Return this machine's curve, and the seconds that it was made of.

    The curve has the cores and the factor for each number of ranks that compute at once, and is that of the least time
    of several rounds. There are more of them while a machine's curve is one that cannot be.
    """
    with torch.random.fork_rng(devices=[]):
        work = _Work(model, rows) if own else None
    alone = work.seconds() if work is not None else 0.0
    # Every rank computes until the slowest one has done its loops.
    wanted = group.gather_json(_LOOPS * alone / cores.get(group.rank, 1.0), number)
    seconds = min(_MOST_SECONDS, max(_LEAST_SECONDS, *wanted))
    counts = levels(len(own)) if own else []
    times: dict[int, list[float]] = {count: [] for count in counts}
    points: list[list[float]] = []
    for done in range(1, _MOST_ROUNDS + 1):
        for turn in range(max(len(levels(len(ranks))) for ranks in machines)):
            group.barrier()
            if work is not None and turn < len(counts) and group.rank in own[: counts[turn]]:
                times[counts[turn]].append(work.repeat(seconds))
        computed = 1.0 if work is None or has_quota() else work.computed
        points = curve_of({sum(cores[rank] for rank in own[:count]): times[count] for count in counts}, computed)
        if done >= _ROUNDS and not any(group.gather_json(is_doubtful(points, times), boolean)):
            break
    return points, times


def curve_of(times: Mapping[float, Sequence[float]], computed: float) -> list[list[float]]:
    """Return a machine's curve from the times of several rounds, by the number of cores that compute in them.

    It is empty for a rank that is not the first on its machine, or whose clock is too coarse. `computed` is the part of
    the time in which the layers compute.
    """
    first = min(times[min(times)], default=0.0) if times else 0.0
    if first <= 0:
        return []
    return [[cores, 1 + computed * (min(found) / first - 1)] for cores, found in sorted(times.items()) if found]


class _Work:
    """Holds the first layers of a model, with inputs for them."""

    def __init__(self, model: Model, rows: int) -> None:
        size, stop = 0, 0
        for place in range(len(model.chain)):
            size += sum(parameter.nbytes for parameter in model.chain.slice(place, place + 1).parameters())
            if size > _MOST_BYTES and stop:
                break
            stop += 1
        self._layers = model.stage(0, stop).train()
        self._entered = model.chain.boundaries[0].example(rows)
        self.computed = 0.0  # the part of the time in which the layers compute, in the loop in which it was largest
        self.seconds()  # warms up
        self.computed = 0.0

    def seconds(self) -> float:
        """Return the processor's seconds to run the layers forward and backward once."""
        begun, start = time.perf_counter(), time.process_time()
        learned = tuple(value for value in flat(self._layers(*self._entered)) if value.requires_grad)
        if learned:
            backward(learned, tuple(torch.ones_like(value) for value in learned))
        seconds = time.process_time() - start
        self.computed = max(self.computed, min(1.0, seconds / max(1e-9, time.perf_counter() - begun)))
        return seconds

    def repeat(self, seconds: float) -> float:
        """Return the median of the processor's seconds over as many loops as there is time for, but at least one."""
        end, found = time.monotonic() + seconds, list[float]()
        while not found or time.monotonic() < end:
            found.append(self.seconds())
        return statistics.median(found)


def _key(model: Model, rows: int, cores: Sequence[float]) -> dict[str, object]:
    """Return all that the contention on this machine depends on, for this model and such ranks."""
    return {
        "format": _FORMAT,
        "device": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "layers": model.chain.names,
        "shapes": [[tensor.shape for tensor in one.tensors] for one in model.chain.boundaries],
        "rows": rows,
        "cores": list(cores),
    }


def _read(key: dict[str, object]) -> list[list[float]] | None:
    """Return the curve that was kept, or None if none was, or one that cannot be."""
    try:
        points = [[float(cores), float(factor)] for cores, factor in kept.read("contention", key)["points"]]
    except (ValueError, KeyError, TypeError):
        return None
    return points if points and not is_doubtful(points) else None
