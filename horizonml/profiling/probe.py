"""Measuring the links between the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter, process_time

import torch

from horizonml.comm.group import Group
from horizonml.planner.hardware import Network

_PROBE_BYTES = 256 << 10
_SLOW_SECONDS, _VERY_SLOW_SECONDS = 5e-3, 5e-2
MOST_PROBED = 16  # ranks between which every pair is probed


def tournament(players: int) -> list[list[tuple[int, int]]]:
    """Rounds in which every pair meets exactly once, and nobody is in two pairs of a round (the circle method)."""
    seats = [*range(players), *([-1] if players % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def probe_pairs(group: Group) -> tuple[Network, list[tuple[float, float]]]:
    """Latency and bandwidth between every two ranks, which meet in rounds that do not collide.

    Also what it costs each rank's processor to send or to receive: seconds for a message, and for a byte more.
    """
    found: dict[int, tuple[float, float]] = {}
    small, large = _Usage(), _Usage()
    for pairs in tournament(group.world_size):
        for pair in pairs:
            if group.rank in pair:
                peer = pair[0] + pair[1] - group.rank
                latency = _exchange(group, peer, 4, 8, small)
                size, seconds = _PROBE_BYTES, max(1e-6, _exchange(group, peer, _PROBE_BYTES, 2, large))
                # Both see about the same, but must decide alike whether the link is slow: rank by rank.
                slow = torch.tensor([seconds if seconds > _SLOW_SECONDS else 0.0])
                other = torch.zeros(1)
                tag = group.channel("probe").tag()
                works = [group.receive(other, peer, tag), group.send(slow, peer, tag)]
                for work in works:
                    group.wait(work, peer)
                if float(slow) or float(other):  # shapers let a burst pass: more shows the true speed
                    times = 3 if max(float(slow), float(other)) < _VERY_SLOW_SECONDS else 2
                    size, seconds = 4 * _PROBE_BYTES, _exchange(group, peer, 4 * _PROBE_BYTES, times, large)
                found[peer] = max(1e-6, latency), size / seconds
        group.barrier()  # keeps the rounds apart
    message = small.seconds / max(1, small.messages)
    byte = max(0.0, large.seconds - large.messages * message) / max(1, large.moved)
    everyone = group.gather_json({"links": [[peer, *link] for peer, link in found.items()], "cost": [message, byte]})
    pairs_ = {
        (rank, int(peer)): (float(latency), float(bandwidth))
        for rank, other in enumerate(everyone)
        for peer, latency, bandwidth in other["links"]
    }
    latency, bandwidth = max(link[0] for link in pairs_.values()), min(link[1] for link in pairs_.values())
    return Network(latency, bandwidth, pairs=pairs_), [(float(a), float(b)) for a, b in (o["cost"] for o in everyone)]


def probe_network(group: Group) -> Network:
    """The slowest connection between neighbouring ranks, which exchange a small and a larger message in two rounds."""
    found = [1e-5, 1e12]
    for first in (0, 1):
        place = group.rank - first
        peer = group.rank + 1 if place % 2 == 0 else group.rank - 1
        if 0 <= peer < group.world_size and place >= 0:
            found = [
                max(found[0], _exchange(group, peer, 4)),
                min(found[1], _PROBE_BYTES / max(1e-6, _exchange(group, peer, _PROBE_BYTES))),
            ]
        group.barrier()  # keeps the rounds apart
    everyone = group.gather_json(found)
    return Network(max(latency for latency, _ in everyone), min(bandwidth for _, bandwidth in everyone))


@dataclass
class _Usage:
    """The processor's time for messages that were sent and received, and their bytes."""

    seconds: float = 0.0
    messages: int = 0
    moved: int = 0


def _exchange(group: Group, peer: int, size: int, times: int = 3, usage: _Usage | None = None) -> float:
    """Seconds for `size` bytes one way, while as many come back; the best of a few times."""
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
