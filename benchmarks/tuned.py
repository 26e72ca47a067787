"""Gives peers the best of what can be set of them: cuts that balance the stages, micro-batches, buckets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import Variant, race
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.plan.plan import Plan, Stage
from horizonml.planner.profile import Profile
from horizonml.tasks.task import InputSpec


def layer_flops(model: str, shape: tuple[int, ...], rows: int = 4) -> list[float]:
    """Return the floating-point operations of each layer, forward and backward, as torch's own counter counts them.

    Layers without matrix products, such as normalisations, count as nothing there.
    """
    built = build(ModelSpec(name=model), 0, 10, InputSpec.of(shape))
    value, found = torch.randn(rows, *shape), []
    for layer in range(len(built.chain)):
        module = built.stage(layer, layer + 1)
        entered = value.detach().requires_grad_(layer > 0)
        with FlopCounterMode(display=False) as counter:
            value = module(entered)
            value.sum().backward()
        found.append(float(counter.get_total_flops()))
    return found


def layer_seconds(profile: Profile, rows: int) -> list[float]:
    """Return the seconds of each layer of a measured profile, forward and backward."""
    return [sum(profile.seconds(layer, rows)) for layer in range(len(profile.layers))]


def balanced(costs: Sequence[float], holders: Sequence[int], allowed: Sequence[int]) -> list[int]:
    """Return the cuts (first layers of stages 1 and up) with which the busiest rank has least to do.

    `holders[s]` is the rank that holds stage s; a rank may hold several. Among equals, the stages are as even as can
    be. Only `allowed` cuts are made: torch's stages fail behind a cut before an activation that works in place, and
    its zero-bubble schedules before one after a view.
    """
    layers, sums = len(costs), [0.0, *itertools.accumulate(costs)]

    def burden(cuts: tuple[int, ...]) -> tuple[float, float]:
        bounds = (0, *cuts, layers)
        each = [sums[stop] - sums[start] for start, stop in itertools.pairwise(bounds)]
        ranks = [0.0] * (max(holders) + 1)
        for cost, rank in zip(each, holders, strict=True):
            ranks[rank] += cost
        return max(ranks), max(each)

    return list(min(itertools.combinations(allowed, len(holders) - 1), key=burden))


def placed(cuts: list[int], layers: int, holders: Sequence[int], micro_batches: int) -> dict[str, Any]:
    """Return a pipeline's plan as JSON in which stage s is held by rank `holders[s]`."""
    bounds = [0, *cuts, layers]
    stages = tuple(Stage(bounds[s], bounds[s + 1], (rank,), (1.0,)) for s, rank in enumerate(holders))
    schedule = "1f1b" if len(set(holders)) == len(holders) else "interleaved"
    return Plan(stages, schedule, micro_batches).to_json()


def best(what: str, make: Callable[[Any], Variant], choices: Sequence[Any], rounds: int = 2, steps: int = 2) -> Any:
    """Return the choice whose variant is fastest in a short race of them all, and print the sweep."""
    raced = race([make(choice) for choice in choices], rounds, steps)
    found = min(zip(choices, raced, strict=True), key=lambda pair: pair[1].median)[0]
    times = ", ".join(f"{choice}: {one.median * 1e3:.0f} ms" for choice, one in zip(choices, raced, strict=True))
    print(f"{what}: {times}; {found} is taken", flush=True)
    return found
