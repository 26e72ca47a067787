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
from horizonml.plan.simulate import Host, Network

_PROBE_TAG = (1 << 30) + 100
_PROBE_BYTES = 256 << 10


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
    network = probe_network(group)
    answer: dict[str, Any] = {}
    if group.rank == 0:
        try:
            profile = cached_profile(model, profile_key(job, info), job.batch_size, say)
            copies = optimizer_copies(job)
            choice = choose(job, profile, world_size, hosts, network, copies)
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
