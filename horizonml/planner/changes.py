"""Describes what is to change about a run's devices and links, and the devices and links after the change."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from horizonml.errors import JobError
from horizonml.planner.hardware import Host, Link, Network
from horizonml.planner.objective import Watts
from horizonml.planner.problem import Problem
from horizonml.planner.record import Planning


@dataclass(frozen=True)
class Added:
    """Describes a device that is added; what is None is as with the device that it is like."""

    like: int | None = None  # a rank of the present plan
    speed: float = 1.0  # relative to that rank's device, or else to rank 0's
    memory: float | None = None
    rate: float | None = None  # of all its links, in bytes per second
    latency: float | None = None
    watts: Watts | None = None
    name: str = ""


@dataclass(frozen=True)
class NewRate:
    """Describes how fast links become: those between `ranks`, all of one rank, or all of them if there is none."""

    ranks: tuple[int, ...]
    bandwidth: float  # bytes per second
    latency: float | None = None


@dataclass(frozen=True)
class Changes:
    """Holds what is to change; ranks are those of the present plan."""

    add: tuple[Added, ...] = ()
    remove: tuple[int, ...] = ()
    rates: tuple[NewRate, ...] = ()


@dataclass(frozen=True)
class Changed:
    """Holds the devices and links after the change."""

    problem: Problem
    names: tuple[str, ...]  # of the ranks' devices
    origins: tuple[int | None, ...]  # the rank that each was in the present plan; None if it is added


def apply_changes(planning: Planning, problem: Problem, changes: Changes) -> Changed:
    """Return the devices and links after the change. Raises JobError if nobody knows how fast a new link would be.

    Links change first, then devices go, then others come.
    """
    network = problem.network
    for rate in changes.rates:
        network = _with_rate(network, problem.ranks, rate)
    kept = [rank for rank in range(problem.ranks) if rank not in changes.remove]
    names = [planning.names[rank] for rank in kept]
    if not changes.add and not changes.remove:
        return Changed(replace(problem, network=network), tuple(names), tuple(kept))
    profiles = [problem.profiles[rank] for rank in kept]
    watts = [problem.watts[rank] if problem.watts else None for rank in kept]
    hosts = _hosts(problem.hosts, kept)
    present, network = network, network.among(kept)
    for added in changes.add:
        model = added.like if added.like is not None else 0
        rank = len(profiles)
        network = _with_device(network, present, problem.ranks, added, kept, rank)
        profile = problem.profiles[model]
        profiles.append(profile if added.speed == 1 else profile.scaled(1 / added.speed))
        usual_watts = problem.watts[model] if added.like is not None and problem.watts else None
        watts.append(added.watts or usual_watts)
        host = next(host for host in problem.hosts if model in host.ranks)
        hosts.append(Host((rank,), host.cores, host.memory if added.memory is None else added.memory))
        usual = f"{planning.devices[model].name}-new" if added.like is not None else "new"
        names.append(_unused(added.name or usual, names))
    origins = (*kept, *[None] * len(changes.add))
    after = replace(problem, profiles=profiles, hosts=hosts, network=network, watts=watts)
    return Changed(after, tuple(names), origins)


def _hosts(hosts: Sequence[Host], kept: Sequence[int]) -> list[Host]:
    """Return the machines of the ranks that stay, which are numbered anew."""
    place = {rank: number for number, rank in enumerate(kept)}
    left = [replace(host, ranks=tuple(place[rank] for rank in host.ranks if rank in place)) for host in hosts]
    return [host for host in left if host.ranks]


def _with_rate(network: Network, ranks: int, rate: NewRate) -> Network:
    """Return the links after one change.

    The rate of a device is that of its own connection: a link to a device with a slower one is as fast as that one.
    """
    pairs = dict(network.pairs)
    for a in range(ranks):
        for b in range(ranks):
            if a == b or (len(rate.ranks) == 2 and {a, b} != set(rate.ranks)):
                continue
            bandwidth = rate.bandwidth
            if len(rate.ranks) == 1:
                (device,) = rate.ranks
                if device not in (a, b):
                    continue
                bandwidth = min(bandwidth, _best(network, a + b - device, [r for r in range(ranks) if r != device]))
            latency = network.between(a, b).latency if rate.latency is None else rate.latency
            pairs[a, b] = latency, bandwidth
    return replace(network, pairs=pairs)


def _best(network: Network, rank: int, others: Sequence[int]) -> float:
    """Return the bandwidth of a rank's fastest link to one of the others; it has no limit if there is none."""
    ways = ((rank, other) for other in others if other != rank)
    rates = [network.between(a, b).bandwidth for pair in ways for a, b in (pair, pair[::-1])]
    return max(rates, default=float("inf"))


def _with_device(
    network: Network, present: Network, ranks: int, added: Added, kept: Sequence[int], rank: int
) -> Network:
    """Return the links with those of a new `rank`; `present` are those among all the `ranks` before the change."""
    pairs = dict(network.pairs)
    before = list(range(rank))  # ranks after the change
    own = [other for other in range(ranks) if other != added.like]
    for other in before:
        origin = kept[other] if other < len(kept) else None  # another new device has no present rank
        for pair, way in (((rank, other), 0), ((other, rank), 1)):
            link = _like(present, added.like, origin, own, way)
            bandwidth = added.rate
            if bandwidth is not None:
                bandwidth = min(bandwidth, _best(network, other, before))
            elif link is not None:
                bandwidth = link.bandwidth
            if bandwidth is None:
                raise JobError("add: nothing is known of the new device's link; say its rate, such as rate=100Mbit")
            latency = added.latency if added.latency is not None else link.latency if link is not None else None
            if latency is None:
                latency = _usual_latency(network, before)
            pairs[pair] = latency, bandwidth
    access = (*network.access, network.bandwidth) if network.access else ()
    return replace(network, pairs=pairs, access=access)


def _like(present: Network, like: int | None, origin: int | None, own: Sequence[int], way: int) -> Link | None:
    """Return the link that a new device has to a rank if it is connected like the rank `like`, or None.

    To the device that it is like, and to other new devices, it has the slowest of that device's links.
    """
    if like is None:
        return None
    if origin is not None and origin != like:
        return present.between(*((like, origin) if way == 0 else (origin, like)))
    links = [present.between(*((like, other) if way == 0 else (other, like))) for other in own]
    if not links:
        return None
    return Link(max(link.latency for link in links), min(link.bandwidth for link in links))


def _usual_latency(network: Network, ranks: Sequence[int]) -> float:
    """Return the median of the links' latencies."""
    found = [network.between(a, b).latency for a in ranks for b in ranks if a != b]
    return statistics.median(found) if found else network.latency


def _unused(name: str, names: Sequence[str]) -> str:
    number = 2
    found = name
    while found in names:
        found, number = f"{name}-{number}", number + 1
    return found
