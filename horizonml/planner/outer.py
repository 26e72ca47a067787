"""Predicts what local steps cost, and after how many steps members should therefore synchronise.

Members that take local steps do not wait for each other from one synchronisation to the next. Of each sum, only the
part that outlasts its delay is waited for, and it is divided among the steps in between. The processor
time for encoding and sending it is not hidden behind anything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from horizonml.plan.gradients import TREE_BYTES, TREE_BYTES_ON_ONE_HOST, tree_messages
from horizonml.plan.local import FEWEST_SYNCHRONISATIONS, Local, outer_optimizer
from horizonml.plan.plan import Plan, Stage
from horizonml.plan.syncs import FORMATS, Sync
from horizonml.planner.cost import Ring, synced_bytes, trained_bytes
from horizonml.planner.problem import Problem

# Parts of a step: members agree as seldom as it takes for that to cost no more than the first, or else the second.
_LITTLE, _MOST = 0.05, 0.1
_FORMATS = ("fp32", "int4")  # of outer gradients, the most precise first
_SPARSE = "topk"  # what is tried last, and only with seldom synchronisations
_SPARSE_RATIO = 18 / 1024  # of float32, that each member sends to each other one
_SPARSE_EVERY = 16
_FRAGMENTS = (1, 4)
_DELAYS = (0, 1, 2, 4)


@dataclass(frozen=True)
class OuterCost:
    """Says what synchronisations add to a step on average, in seconds."""

    waiting: float  # for what outlasts the delay
    processor: float  # for coding, and for sending and receiving

    @property
    def seconds(self) -> float:
        """Return both together."""
        return self.waiting + self.processor


def outer_ratio(local: Local, members: int) -> float:
    """Return the bytes of outer gradients relative to those of float32, as if all were summed along a ring."""
    if local.format == _SPARSE:  # all members receive those of all others, and add them up
        return _SPARSE_RATIO * members / 2
    return FORMATS[local.format].ratio


def outer_bytes(problem: Problem, plan: Plan, stage: Stage) -> float:
    """Return the bytes of outer gradients of a stage that members sum, on average over the steps."""
    if plan.local is None or len(stage.ranks) == 1:
        return 0.0
    ratio = outer_ratio(plan.local, len(stage.ranks)) / plan.local.every
    return trained_bytes(problem.profiles[stage.ranks[0]], stage) * ratio


def summed_bytes(problem: Problem, plan: Plan, stage: Stage) -> list[float]:
    """Return the bytes that each member of a stage sends in a step, on average, so that the members agree."""
    count = len(stage.ranks)
    if count == 1 or stage.splits_channels:
        return [0.0] * count
    if stage.sync.steps_alone:
        size = outer_bytes(problem, plan, stage)
    else:
        size = synced_bytes(problem, stage.sync, stage.start, stage.stop)
    here = {problem.host_of[rank] for rank in stage.ranks}
    tree = TREE_BYTES_ON_ONE_HOST if len(here) == 1 else TREE_BYTES
    if stage.sync.sums_along_trees and math.isfinite(size) and size <= tree:
        return [size * tree_messages(place, count) for place in range(count)]
    return [2 * (count - 1) / count * size] * count


def fragment_bytes(problem: Problem, stage: Stage, fragments: int) -> list[float]:
    """Return the bytes of the parameters of each fragment of a stage: consecutive layers, as even as layers allow."""
    sizes = [layer.trained for layer in problem.profiles[stage.ranks[0]].layers[stage.start : stage.stop]]
    found, before, total = [0.0] * fragments, 0, sum(sizes)
    for size in sizes:
        if size:
            found[min(fragments - 1, int(fragments * (before + size / 2) / total))] += size
        before += size
    return found


def outer_cost(problem: Problem, plan: Plan, computing: float) -> OuterCost:
    """Return what the synchronisations of local steps add to a step that takes `computing` seconds without them."""
    local = plan.local
    if local is None:
        return OuterCost(0.0, 0.0)
    waiting = processor = 0.0
    for stage in plan.stages:
        count = len(stage.ranks)
        if count == 1:
            continue
        whole = trained_bytes(problem.profiles[stage.ranks[0]], stage)
        ratio, most = outer_ratio(local, count), local.delay * computing
        parts = [size * ratio for size in fragment_bytes(problem, stage, local.fragments) if size]
        ring = Ring(problem, stage.ranks)
        times = [ring.seconds(size) for size in parts]
        left = sum(max(0.0, seconds - most) for seconds in times)
        moved = 4 * (count - 1) / count * whole * ratio
        work = 0.0
        for rank in stage.ranks:
            profile = problem.profiles[rank]
            codings = Sync.INT4.codings if local.format != _SPARSE else 2 + count
            coding = codings * whole * profile.codec_seconds_per_byte.get(local.format, 0.0)
            carried = moved * (profile.transfer_seconds_per_byte + profile.crossing_seconds_per_byte)
            work = max(work, (coding + carried) * problem.oversubscription[rank])
        hidden = 1 - left / max(sum(times), 1e-12)
        waiting, processor = max(waiting, left), max(processor, work * hidden)
    return OuterCost(waiting / local.every, processor / local.every)


def gentlest(problem: Problem, plan: Plan, computing: float) -> Local | None:
    """Return the local steps that stay closest to training in step, among those whose sums cost little of a step.

    They synchronise as often as that allows; then as precisely; then with as little delay. Only if none does, most of
    what members send is left out. If that costs too much, too, return those that cost least, or None if the constraints
    allow none. `computing` is what a step of the plan takes without synchronisations.
    """
    found = [(outer_cost(problem, _with(plan, local), computing).seconds, local) for local in _choices(problem)]
    for limit, sparse in ((_LITTLE, False), (_MOST, False), (_MOST, True)):
        for seconds, local in found:
            if seconds <= limit * computing and (local.format == _SPARSE) == sparse:
                return local
    return min(found, key=lambda one: one[0])[1] if found else None


def _with(plan: Plan, local: Local) -> Plan:
    return replace(plan, local=local)


def _choices(problem: Problem) -> Iterator[Local]:
    """Yield the local steps that the constraints allow, those first that stay closest to training in step."""
    constraints = problem.constraints
    if constraints.local is not None:
        yield constraints.local
        return
    steps = problem.objective.steps  # of the run, if that is known
    allowed = [every for every in constraints.every if not steps or every * FEWEST_SYNCHRONISATIONS <= steps]
    formats = list(itertools.product(allowed, _FORMATS))
    formats += [(every, _SPARSE) for every in allowed if every >= _SPARSE_EVERY]
    for every, format in formats:
        for fragments, delay in itertools.product(_FRAGMENTS, _DELAYS):
            if fragments <= min(problem.layers, every) and delay < every // fragments:
                yield Local(every, fragments, delay, format, *outer_optimizer())
