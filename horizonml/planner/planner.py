"""Turns what a job asks for into a plan.

What the job does not say (cuts, number of micro-batches, how a hybrid spreads its ranks) is chosen by predicted step
time. For each number of stages and micro-batches, dynamic programming places the cuts so that the slowest stage is as
fast as possible (PipeDream, SOSP 2019, section 3.1); the simulation then compares the candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from horizonml.errors import PlanError
from horizonml.job.schema import Job, Parallel, StageSpec
from horizonml.plan.plan import FORMATS, Plan, Stage, Sync
from horizonml.planner.hardware import Host, Network
from horizonml.planner.profile import Profile
from horizonml.planner.search import MICRO_BATCHES, Found, Problem, search
from horizonml.text import count


def needs_profile(parallel: Parallel, world_size: int) -> bool:
    """Whether the plan depends on measurements."""
    stages = parallel.stages
    if stages is not None:
        cut = any(stage.layers is None for stage in stages) and len(stages) > 1
        return cut or (len(stages) > 1 and parallel.micro_batches is None)
    return parallel.strategy in ("pipeline", "hybrid", "auto") and world_size > 1


def fixed_plan(job: Job, layers: int, world_size: int) -> Plan:
    """The plan of a job that needs no profile. Raises PlanError."""
    parallel = job.parallel
    micro_batches = parallel.micro_batches or 1
    if parallel.stages is None:  # one stage, which sends nothing on
        ranks = tuple(range(world_size))
        sync = _sync(parallel)
        return Plan((Stage(0, layers, ranks, (1.0,) * world_size, sync),), parallel.schedule, micro_batches)
    ends = [spec.layers[1] + 1 if spec.layers else layers for spec in parallel.stages]
    plan = Plan(_stages(parallel.stages, ends, _format(parallel)), parallel.schedule, micro_batches)
    plan.check(layers, world_size)
    return plan


def problem_for(
    job: Job,
    profiles: Sequence[Profile],
    hosts: Sequence[Host],
    network: Network,
    optimizer_copies: int,
    gradient_ratio: float,
    last_batch: int,
) -> Problem:
    """What a job leaves open to the search, with a profile for every rank; the rest is as for `Problem`."""
    parallel = job.parallel
    counts = [parallel.micro_batches] if parallel.micro_batches else list(MICRO_BATCHES)
    formats = tuple(FORMATS) if parallel.activations == "auto" else (parallel.activations,)
    schedule = parallel.schedule
    return Problem(
        profiles,
        hosts,
        network,
        job.batch_size,
        optimizer_copies,
        schedule,
        counts,
        formats,
        gradient_ratio,
        last_batch,
    )


def choose(job: Job, problem: Problem) -> Found:
    """The fastest predicted plan of the kind that the job asks for, among those that fit into memory.

    Unless its strategy is `auto`, rank 0's profile stands for all. If no plan fits, the one that comes nearest. Raises
    PlanError if the model has too few layers.
    """
    if job.parallel.strategy == "auto" and job.parallel.stages is None:
        return search(problem)
    profile = problem.profiles[0]
    candidates = [problem.judge(plan) for plan in _candidates(job, profile, problem.ranks)]
    if not candidates:
        least = 2 if job.parallel.strategy == "hybrid" else problem.ranks
        raise PlanError(
            f"{job.model.name} can be cut into at most {count(len(profile.layers), 'stage')}, but the plan needs "
            f"{least}; use fewer workers, or strategy hybrid or ddp"
        )
    return min(candidates, key=lambda found: found.cost)


def _candidates(job: Job, profile: Profile, world_size: int) -> Iterator[Plan]:
    parallel, layers = job.parallel, len(profile.layers)
    counts = (parallel.micro_batches,) if parallel.micro_batches else MICRO_BATCHES
    for micro_batches in counts:
        if micro_batches > job.batch_size:
            continue
        rows = -(-job.batch_size // micro_batches)
        if parallel.stages is not None:
            if parallel.stages[0].layers is not None:
                ends = [spec.layers[1] + 1 for spec in parallel.stages if spec.layers]
            else:
                slowest = [_largest_share(spec) for spec in parallel.stages]
                found = _balance(profile, rows, slowest)
                if found is None:
                    continue
                ends = found
            plan = Plan(_stages(parallel.stages, ends, _format(parallel)), parallel.schedule, micro_batches)
            plan.check(layers, world_size)
            yield plan
        else:
            for shape in _shapes(parallel.strategy, world_size, layers):
                if rows < max(shape):
                    continue
                cuts = [_balance(profile, rows, [1 / members for members in shape])]
                if parallel.strategy == "pipeline":  # with devices unlike the first, an equal split may be better
                    cuts.append([layers * (stage + 1) // world_size for stage in range(world_size)])
                for cut in cuts:
                    if cut is not None:
                        yield Plan(_equal_stages(shape, cut, _format(parallel)), parallel.schedule, micro_batches)


def _shapes(strategy: str, world_size: int, layers: int) -> Iterator[tuple[int, ...]]:
    """Numbers of members, stage by stage, that a strategy allows."""
    if strategy == "pipeline":
        if world_size <= layers:
            yield (1,) * world_size
        return
    for stages in range(2, min(world_size - 1, layers) + 1):
        yield from _compositions(world_size, stages)


def _compositions(total: int, parts: int, most: int = 200) -> Iterator[tuple[int, ...]]:
    """Ways to write `total` as an ordered sum of `parts` numbers above 0; only even ones where there are too many."""
    ways = 1
    for index in range(1, parts):
        ways = ways * (total - index) // index
    if ways > most:
        yield tuple(total // parts + (index < total % parts) for index in range(parts))
        return
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _compositions(total - first, parts - 1, most):
            yield (first, *rest)


def _balance(profile: Profile, rows: int, shares: Sequence[float]) -> list[int] | None:
    """Where each stage ends so that the slowest is as fast as possible.

    `shares[s]` is the share of the rows of the busiest rank of stage s. None if there are fewer layers than stages.
    """
    layers = len(profile.layers)
    if layers < len(shares):
        return None
    best = [0.0] + [float("inf")] * layers  # of the first l layers over the stages so far
    cuts: list[list[int]] = []
    for share in shares:
        own_rows = max(1, round(rows * share))
        total = [0.0]
        for layer in range(layers):
            total.append(total[-1] + sum(profile.seconds(layer, own_rows)))
        new, where = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for stop in range(1, layers + 1):
            for start in range(stop):
                slowest = max(best[start], total[stop] - total[start])
                if slowest < new[stop]:
                    new[stop], where[stop] = slowest, start
        best = new
        cuts.append(where)
    ends, stop = [], layers
    for where in reversed(cuts):
        ends.append(stop)
        stop = where[stop]
    return ends[::-1]


def _largest_share(spec: StageSpec) -> float:
    return max(spec.shares) / sum(spec.shares) if spec.shares else 1 / len(spec.ranks)


def _sync(parallel: Parallel) -> Sync:
    """How members agree."""
    if parallel.strategy == "horovod":
        return Sync.HOROVOD_FP16 if parallel.gradient_compression == "fp16" else Sync.HOROVOD
    if parallel.strategy == "tensor":
        return Sync.CHANNELS
    return {"none": Sync.ALL_REDUCE, "fp16": Sync.FP16, "powersgd": Sync.POWERSGD}[parallel.gradient_compression]


def _format(parallel: Parallel) -> str:
    """What stages send, where the plan leaves it to the job."""
    return "fp32" if parallel.activations == "auto" else parallel.activations


def _stages(specs: Sequence[StageSpec], ends: Sequence[int], format: str) -> tuple[Stage, ...]:
    starts = [0, *ends[:-1]]
    return tuple(
        Stage(
            start,
            end,
            tuple(spec.ranks),
            tuple(spec.shares or [1.0] * len(spec.ranks)),
            Sync.CHANNELS if spec.split == "channels" else Sync.ALL_REDUCE,
            spec.send or format,
        )
        for spec, start, end in zip(specs, starts, ends, strict=True)
    )


def _equal_stages(shape: Sequence[int], ends: Sequence[int], format: str) -> tuple[Stage, ...]:
    """Ranks in order, equal shares."""
    specs, rank = [], 0
    for members in shape:
        specs.append(StageSpec(ranks=list(range(rank, rank + members)), shares=None, send=None, layers=None))
        rank += members
    return _stages(specs, ends, format)
