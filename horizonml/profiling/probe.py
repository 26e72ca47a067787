"""Measures the links between the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter, process_time

import torch

from horizonml.comm.group import Group
from horizonml.planner.hardware import Network

_PROBE_BYTES = 256 << 10
_SLOW_SECONDS, _VERY_SLOW_SECONDS = 5e-3, 5e-2
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
                latency = _exchange(group, peer, 4, 8, small)
                size, seconds = _PROBE_BYTES, max(1e-6, _exchange(group, peer, _PROBE_BYTES, 2, large))
                # Both ranks measure about the same, but must decide alike whether the link is slow.
                slow = torch.tensor([seconds if seconds > _SLOW_SECONDS else 0.0])
                other = torch.zeros(1)
                tag = group.channel("probe").tag()
                works = [group.receive(other, peer, tag), group.send(slow, peer, tag)]
                for work in works:
                    group.wait(work, peer)
                if float(slow) or float(other):  # traffic shapers let a burst pass; more data shows the true speed
                    times = 3 if max(float(slow), float(other)) < _VERY_SLOW_SECONDS else 2
                    size, seconds = 4 * _PROBE_BYTES, _exchange(group, peer, 4 * _PROBE_BYTES, times, large)
                found[peer] = max(1e-6, latency), size / seconds
        group.barrier()  # separates the rounds
    message = small.seconds / max(1, small.messages)
    byte = max(0.0, large.seconds - large.messages * message) / max(1, large.moved)
    cost = [message, byte, _crossing(before, _carried(group))]
    everyone = group.gather_json({"links": [[peer, *link] for peer, link in found.items()], "cost": cost})
    pairs_ = {
        (rank, int(peer)): (float(latency), float(bandwidth))
        for rank, other in enumerate(everyone)
        for peer, latency, bandwidth in other["links"]
    }
    latency, bandwidth = max(link[0] for link in pairs_.values()), min(link[1] for link in pairs_.values())
    costs = [MessageCost(float(a), float(b), float(c)) for a, b, c in (other["cost"] for other in everyone)]
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
            found = [
                max(found[0], _exchange(group, peer, 4)),
                min(found[1], _PROBE_BYTES / max(1e-6, _exchange(group, peer, _PROBE_BYTES))),
            ]
        group.barrier()  # separates the rounds
    everyone = group.gather_json(found)
    return Network(max(latency for latency, _ in everyone), min(bandwidth for _, bandwidth in everyone))


@dataclass
class _Usage:
    """Counts messages sent and received, their bytes, and the processor time that they took."""

    seconds: float = 0.0
    messages: int = 0
    moved: int = 0


def _exchange(group: Group, peer: int, size: int, times: int = 3, usage: _Usage | None = None) -> float:
    """Return the best of several times, in seconds, for `size` bytes one way while as many travel the other way."""
    sent, received = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    best, used = float("inf"), process_time()
    for _ in range(times):
        start = perf_counter()
        tag = group.channel("probe").tag()
        works = [group.receive(received, peer, tag), group.send(sent, peer, tag)]
        for work in works:
            group.wait(work, peer)
        best = min(best, perf_counter() - start)
    if usage is not None:
        usage.seconds += process_time() - used
        usage.messages += 2 * times
        usage.moved += 2 * times * size
    return best
