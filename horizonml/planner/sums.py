"""How the gradients of a stage are gathered for their sum, in buckets, and how long that takes.

Buckets are filled in the order of the backward pass; a full one is sent on its way while earlier layers still compute
(Li et al., VLDB 2020). The engine sums so, and the simulation predicts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from horizonml.plan.plan import Stage
from horizonml.planner.hardware import Host, Network
from horizonml.planner.profile import Profile

BUCKET_BYTES = 25 << 20


def in_buckets(sizes: Sequence[int], limit: float = BUCKET_BYTES) -> list[list[int]]:
    """Indices of `sizes` (in bytes) from the last to the first, in buckets of at most `limit` bytes, or one each."""
    buckets: list[list[int]] = []
    filled = 0
    for index in reversed(range(len(sizes))):
        if not buckets or filled + sizes[index] > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets


def summed_at(
    stage: Stage,
    last_backward: Mapping[int, tuple[float, float]],
    profiles: Sequence[Profile],
    gradient_ratio: float,
    network: Network,
    hosts: Sequence[Host],
) -> float:
    """When the gradients of a stage are summed: bucket by bucket, each once all members have its gradients.

    `last_backward[r]` are begin and end of rank r's last backward pass, if it has any. Seconds, as in `predict`.
    """
    layers = range(stage.start, stage.stop)
    sizes = [profiles[stage.ranks[0]].layers[layer].parameter_bytes for layer in layers]
    ends = [last_backward.get(rank, (0.0, 0.0)) for rank in stage.ranks]
    done = max(end for _, end in ends)
    if len(stage.ranks) == 1:
        return done
    # How far through its last backward pass a member is when a layer's gradients are there; the same for all of them.
    times = [profiles[stage.ranks[0]].layers[layer].backward[-1] for layer in layers]
    total = max(sum(times), 1e-12)
    at = 0.0
    for bucket in in_buckets(sizes):
        part = sum(times[min(bucket) :]) / total
        ready = max(begin + part * (end - begin) for begin, end in ends)
        size = gradient_ratio * sum(sizes[index] for index in bucket)
        at = max(at, ready) + ring_seconds(stage.ranks, size, network, profiles, hosts)
    return max(at, done)


def ring_seconds(
    ranks: Sequence[int], size: float, network: Network, profiles: Sequence[Profile], hosts: Sequence[Host]
) -> float:
    """A ring's time to sum `size` bytes over some ranks.

    Its slowest link decides, or its slowest processor, for every member sends and receives nearly all of it twice. A
    link within a machine is its processor's work, too, which its other ranks then have to wait for.
    """
    count = len(ranks)
    if count == 1:
        return 0.0
    links = [network.between(rank, ranks[(place + 1) % count]) for place, rank in enumerate(ranks)]
    latency, bandwidth = max(link[0] for link in links), min(link[1] for link in links)
    ring = 2 * (count - 1) * (latency + size / count / bandwidth)
    moved = 4 * (count - 1) / count * size
    found, members = [ring], set(ranks)
    for host in hosts:
        here = members.intersection(host.ranks)
        crowd = max(1.0, len(host.ranks) / host.cores)
        found += [moved * profiles[rank].transfer_seconds_per_byte * crowd for rank in here]
        if len(here) > 1:
            found.append(ring * crowd)
    return max(found)
