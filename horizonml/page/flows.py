"""Estimates what flows over each link: records say how much a rank sends in which direction, and the plan to whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from horizonml.plan.plan import Plan, routes

ACTIVATIONS, GRADIENTS = "activations", "gradients"


@dataclass(frozen=True)
class Flow:
    """Describes what goes from one rank to another, in bytes per second."""

    sender: int
    receiver: int
    what: str  # ACTIVATIONS (and their gradients on the way back), or GRADIENTS that members sum
    rate: float


Rates = Mapping[int, Mapping[str, float]]  # rank -> direction ("previous", "next", "members") -> bytes per second


def flows(plan: Plan, sent: Rates, received: Rates) -> list[Flow]:
    """Return what goes from each rank to each other one.

    What goes to another stage is spread over its members as the samples are; what members exchange goes around the ring
    that they form. Where the sender's records are elsewhere, those of the receiver tell.
    """
    found: dict[tuple[int, int, str], float] = {}
    for what, direction, back, weights in (
        (ACTIVATIONS, "next", "previous", _between(plan)),
        (ACTIVATIONS, "previous", "next", {(b, a): weight for (a, b), weight in _between(plan).items()}),
        (GRADIENTS, "members", "members", _among(plan)),
    ):
        for (one, other), weight in weights.items():
            leaving = sum(part for (sender, _), part in weights.items() if sender == one)
            coming = sum(part for (_, receiver), part in weights.items() if receiver == other)
            known = sent.get(one, {}).get(direction, 0.0) * weight / leaving
            rate = known or received.get(other, {}).get(back, 0.0) * weight / coming
            if rate > 0:
                found[one, other, what] = found.get((one, other, what), 0.0) + rate
    return [Flow(one, other, what, rate) for (one, other, what), rate in sorted(found.items())]


def _between(plan: Plan) -> dict[tuple[int, int], float]:
    """Return how many samples of a micro-batch go from each rank to each other one on their way forward."""
    size = max(plan.micro_sizes(plan.micro_batches * 1024, plan.micro_batches * 1024))
    found: dict[tuple[int, int], float] = {}
    for stage, after in pairwise(plan.stages):
        for rank, rows in zip(stage.ranks, stage.rows(size), strict=True):
            for route in routes(rows, after, size):
                if route.peer != rank:
                    found[rank, route.peer] = found.get((rank, route.peer), 0.0) + route.stop - route.start
    return found


def _among(plan: Plan) -> dict[tuple[int, int], float]:
    """Return the links of the rings that the members of stages form, each with how many of them it belongs to."""
    found: dict[tuple[int, int], float] = {}
    for stage in plan.stages:
        if len(stage.ranks) > 1:
            for rank, after in zip(stage.ranks, (*stage.ranks[1:], stage.ranks[0]), strict=True):
                found[rank, after] = found.get((rank, after), 0.0) + 1.0
    return found
