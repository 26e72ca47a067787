"""Measures the links between the ranks of a group."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from time import perf_counter, process_time, sleep

import torch

from horizonml.comm.expected import fields, items, number, whole
from horizonml.comm.group import Group
from horizonml.planner.profile import Network
from horizonml.profiling.kept import is_settled

_PROBE_BYTES = 256 << 10
_SLOW_SECONDS, _VERY_SLOW_SECONDS = 5e-3, 5e-2
_SLOWEST_SECONDS = 0.5  # what takes longer is looked at once: no other program holds up a message for so long
_MOST_LOOKS = 3
_PAUSE_SECONDS = 0.12  # between two looks: longer than the period of a quota
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
class MessageCost:
    """Holds the processor time that messages take on a device, in seconds."""

    message: float = 0.0  # each
    byte: float = 0.0  # each
    crossing: float = 0.0  # each byte to or from another machine, beyond that: for encryption, and to be carried


def probe_pairs(group: Group) -> tuple[Network, list[MessageCost]]:
    """Return the latency and bandwidth between every two ranks, and what messages cost each rank's processor.

    Pairs are probed in rounds in which no rank takes part twice.
    """
    found: dict[int, tuple[float, float]] = {}
    before = _carried(group)
    small, large = _Usage(), _Usage()
    for pairs in tournament(group.world_size):
        for pair in pairs:
            if group.rank in pair:
                peer = pair[0] + pair[1] - group.rank
                found[peer] = _probe(group, peer, small, large)
        group.barrier()  # separates the rounds
    message = small.seconds / max(1, small.messages)
    byte = max(0.0, large.seconds - large.messages * message) / max(1, large.moved)
    own = [message, byte, _crossing(before, _carried(group))]
    everyone = group.gather_json(
        [[[peer, *link] for peer, link in found.items()], *own],
        fields(items(fields(whole(0, group.world_size - 1), number, number)), number, number, number),
    )
    pairs_ = {
        (rank, peer): (latency, bandwidth)
        for rank, (links, *_) in enumerate(everyone)
        for peer, latency, bandwidth in links
    }
    latency, bandwidth = max(link[0] for link in pairs_.values()), min(link[1] for link in pairs_.values())
    costs = [MessageCost(a, b, c) for _, a, b, c in everyone]
    return Network(latency, bandwidth, pairs=pairs_), [
        replace(cost, crossing=max(one.crossing for one, host in zip(costs, group.hosts, strict=True) if host == own))
        for cost, own in zip(costs, group.hosts, strict=True)
    ]


def _carried(group: Group) -> tuple[float, int]:
    """Return the processor's seconds that this rank's tunnel has taken so far, and the bytes that it has carried."""
    if group.links is None:
        return 0.0, 0
    usage = group.links.tunnel.usage()
    return usage.seconds, usage.sent + usage.received


def _crossing(before: tuple[float, int], after: tuple[float, int]) -> float:
    """Return the processor's seconds for each byte that a tunnel has carried, 0 if it has carried too few to tell.

    One rank's tunnel may carry what comes to all ranks of its machine.
    """
    moved = after[1] - before[1]
    return max(0.0, after[0] - before[0]) / moved if moved >= _PROBE_BYTES else 0.0


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
