"""What the ranks of a group agree on before they train: what the data looks like, and the plan.

For the plan rank 0 measures and decides, and all follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from horizonml.data.datasets import DataInfo, agree, describe
from horizonml.engine.group import Group
from horizonml.engine.measure import cached_profile
from horizonml.errors import DataError, HorizonError, PlanError
from horizonml.job import Job, Sgd
from horizonml.model.zoo import Model, build, channels_of
from horizonml.plan.plan import Plan
from horizonml.plan.planner import choose, fixed_plan, needs_profile
from horizonml.plan.profile import Profile
from horizonml.plan.simulate import Host, Network

_PROBE_TAG = (1 << 30) + 100
_PROBE_BYTES = 256 << 10
_SLOW_SECONDS = 5e-3
MOST_PROBED = 16  # ranks between which every pair is probed


def describe_together(job: Job, group: Group) -> tuple[DataInfo, Model]:
    """The data as all ranks see it, and the model for it."""
    found: list[DataInfo | None] = []
    info: dict[str, Any] | None = None
    problem = None
    try:
        described = describe(job.data)
        if described is not None:
            channels = channels_of(job.model, described.shape[0])
            described = describe(job.data, channels)
        info = vars(described) if described is not None else None
    except HorizonError as error:
        problem = str(error)
    for rank, (value, trouble) in enumerate(group.gather_json([info, problem])):
        if trouble is not None:
            raise DataError(trouble if group.world_size == 1 else f"rank {rank}: {trouble}")
        found.append(None if value is None else DataInfo(**{**value, "shape": tuple(value["shape"])}))
    agreed = agree(found, job.data)
    return agreed, build(job.model, job.seed, agreed.classes, agreed.shape)


def make_plan(
    job: Job, model: Model, info: DataInfo, group: Group, hosts: Sequence[Host], say: Callable[[str], None]
) -> Plan:
    """The plan of a job, the same on all ranks. Raises PlanError on all of them."""
    world_size = group.world_size
    if not needs_profile(job.parallel, world_size):
        return fixed_plan(job, len(model.chain), world_size)
    automatic = job.parallel.strategy == "auto" and job.parallel.stages is None
    network = probe_pairs(group) if automatic and world_size <= MOST_PROBED else probe_network(group)
    # For an automatic plan every machine measures its own device; otherwise rank 0's stands for all.
    lead = next(host.ranks[0] for host in hosts if group.rank in host.ranks)
    own: dict[str, Any] | None = None
    problem = None
    if group.rank == (lead if automatic else 0):
        try:
            own = cached_profile(model, profile_key(job, info), job.batch_size, say).to_json()
        except HorizonError as error:
            problem = str(error)
    measured = group.gather_json([own, problem])
    answer: dict[str, Any] = next(({"error": text} for _, text in measured if text is not None), {})
    if group.rank == 0 and not answer:
        try:
            first = {rank: host.ranks[0] if automatic else 0 for host in hosts for rank in host.ranks}
            profiles = [Profile.from_json(measured[first[rank]][0]) for rank in range(world_size)]
            copies = optimizer_copies(job)
            choice = choose(job, profiles, world_size, hosts, network, copies)
            if automatic:
                say(f"predicted to be fastest, with {choice.prediction.seconds * 1000:.0f} ms a step:")
                say(choice.plan.describe(model.chain.names))
            if not choice.prediction.fits:
                say("warning: no plan was found that fits into the ranks' memory; this one comes nearest")
            answer = {"plan": choice.plan.to_json()}
        except HorizonError as error:
            answer = {"error": str(error)}
    answer = group.share_json(answer)
    if "error" in answer:
        raise PlanError(answer["error"])
    return Plan.from_json(answer["plan"])


def profile_key(job: Job, info: DataInfo) -> dict[str, Any]:
    """What a profile depends on, beside the device."""
    return {"model": job.model.model_dump(), "classes": info.classes, "shape": info.shape}


def optimizer_copies(job: Job) -> int:
    """How many numbers the optimizer keeps per parameter."""
    if isinstance(job.optimizer, Sgd):
        return int(job.optimizer.momentum > 0)
    return 2


def tournament(players: int) -> list[list[tuple[int, int]]]:
    """Rounds in which every pair meets exactly once, and nobody is in two pairs of a round (the circle method)."""
    seats = [*range(players), *([-1] if players % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def probe_pairs(group: Group) -> Network:
    """Latency and bandwidth between every two ranks, which meet in rounds that do not collide."""
    found: dict[int, tuple[float, float]] = {}
    for pairs in tournament(group.world_size):
        for pair in pairs:
            if group.rank in pair:
                peer = pair[0] + pair[1] - group.rank
                latency = _exchange(group, peer, 4)
                size, seconds = _PROBE_BYTES, max(1e-6, _exchange(group, peer, _PROBE_BYTES))
                # Both see about the same, but must decide alike whether the link is slow: rank by rank.
                slow = torch.tensor([float(seconds > _SLOW_SECONDS)])
                other = torch.zeros(1)
                works = [group.receive(other, peer, _PROBE_TAG), group.send(slow, peer, _PROBE_TAG)]
                for work in works:
                    group.wait(work, peer)
                if float(slow) or float(other):  # shapers let a burst pass: more shows the true speed
                    size, seconds = 4 * _PROBE_BYTES, _exchange(group, peer, 4 * _PROBE_BYTES)
                found[peer] = max(1e-6, latency), size / seconds
        group.gather_json(None)  # keeps the rounds apart
    everyone = group.gather_json([[peer, *link] for peer, link in found.items()])
    pairs_ = {
        (rank, int(peer)): (float(latency), float(bandwidth))
        for rank, links in enumerate(everyone)
        for peer, latency, bandwidth in links
    }
    latency, bandwidth = max(link[0] for link in pairs_.values()), min(link[1] for link in pairs_.values())
    return Network(latency, bandwidth, pairs=pairs_)


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
        group.gather_json(None)  # keeps the rounds apart
    everyone = group.gather_json(found)
    return Network(max(latency for latency, _ in everyone), min(bandwidth for _, bandwidth in everyone))


def _exchange(group: Group, peer: int, size: int) -> float:
    """Seconds for `size` bytes one way, while as many come back; the best of three."""
    sent, received = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    best = float("inf")
    for _ in range(3):
        start = perf_counter()
        works = [group.receive(received, peer, _PROBE_TAG), group.send(sent, peer, _PROBE_TAG)]
        for work in works:
            group.wait(work, peer)
        best = min(best, perf_counter() - start)
    return best
