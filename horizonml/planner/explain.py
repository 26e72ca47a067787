"""Explains a plan: its stages as a table, what the time of a step goes to, and how simpler plans compare."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from horizonml.plan.plan import Stage, Sync
from horizonml.planner.candidates import equal_split, plain_ddp
from horizonml.planner.cost import gradient_message_bytes, message_bytes, synced_bytes
from horizonml.planner.evaluator import Candidate, Evaluator, judge
from horizonml.planner.problem import MICRO_BATCHES, Constraints, Problem
from horizonml.planner.profile import Profile
from horizonml.planner.search import search
from horizonml.planner.subset import fastest_alone, outnumbers_cores
from horizonml.text import count, human_bytes, human_seconds

_AS_GOOD_AS_NOTHING = 0.02  # of a step
_WORTH_A_WARNING = 0.05  # of a step: what a simpler plan saves at least
_MOST_OF_THE_TIME = 0.5  # a layer that takes more than this part leaves little to share out


@dataclass(frozen=True)
class Row:
    """Describes one rank of a plan, for people."""

    stage: str
    layers: str
    rank: str
    rows: str  # of every micro-batch
    sends: str  # to the next stage, and in which format
    memory: str
    busy: str


def rows(problem: Problem, found: Candidate, names: Sequence[str], layer_names: Sequence[str]) -> list[Row]:
    """Return the table of a plan, with a row for each member of each stage."""
    plan, prediction = found.plan, found.prediction
    size = max(plan.micro_sizes(problem.batch_size, problem.batch_size))
    table = []
    for number, stage in enumerate(plan.stages):
        first, last = layer_names[stage.start], layer_names[stage.stop - 1]
        bytes_ = message_bytes(problem.profiles[0], stage.stop, stage.send)
        last_stage = number + 1 == len(plan.stages)
        for rank, (start, stop) in zip(stage.ranks, stage.rows(size), strict=True):
            share = _busy(problem, found, rank)
            table.append(
                Row(
                    str(number),
                    f"{stage.start}-{stage.stop - 1} ({first} .. {last})"
                    if first != last
                    else f"{stage.start} ({first})",
                    str(rank) if names[rank] == f"rank {rank}" else f"{rank} ({names[rank]})",
                    f"{stop - start} of {size}",
                    "-" if last_stage else f"{human_bytes(bytes_ * (stop - start))} {stage.send}",
                    f"{human_bytes(prediction.memory[rank])} of {human_bytes(problem.memory[rank])}",
                    f"{min(1.0, share):.0%}",
                )
            )
    return table


def explain_parts(found: Candidate) -> str:
    """Return what the time of a step consists of, in its order."""
    parts = {name: seconds for name, seconds in found.prediction.parts.items() if seconds >= 5e-4}
    return ", then ".join(f"{human_seconds(seconds)} {name}" for name, seconds in parts.items())


def bottleneck(problem: Problem, found: Candidate, names: Sequence[str]) -> str:
    """Return a sentence about what the step waits for most."""
    plan, seconds = found.plan, found.prediction.seconds
    busiest = max(found.prediction.busy, key=lambda rank: _busy(problem, found, rank))
    shares = {f"{_who(names, busiest)} computes": _busy(problem, found, busiest)}
    for number, stage in enumerate(plan.stages):
        if len(stage.ranks) > 1:
            summed = synced_bytes(problem, stage.sync, stage.start, stage.stop)
            moved = 2 * (len(stage.ranks) - 1) / len(stage.ranks) * summed
            slowest = _slowest(problem, stage, stage)
            words = f"the members of stage {number} sum their gradients ({human_bytes(moved)} each)"
            shares[words] = moved / slowest / seconds
        if number + 1 < len(plan.stages):
            after = plan.stages[number + 1]
            moved = message_bytes(problem.profiles[0], stage.stop, stage.send) * problem.batch_size
            slowest = _slowest(problem, stage, after)
            back = ", and back" if problem.profiles[0].layers[stage.stop - 1].returns_gradients else ""
            words = f"activations go from stage {number} to {number + 1} ({human_bytes(moved)}{back})"
            shares[words] = moved / slowest / min(len(stage.ranks), len(after.ranks)) / seconds
    words = max(shares, key=lambda name: shares[name])
    return f"The bottleneck: {words} for {min(1.0, shares[words]):.0%} of a step."


def why(problem: Problem, found: Candidate, names: Sequence[str]) -> list[str]:
    """Return sentences on what would travel otherwise, and on who is idle; `reasons` explains each choice."""
    plan, lines = found.plan, []
    everything = synced_bytes(problem, Sync.ALL_REDUCE, 0, problem.layers)
    if len(plan.stages) > 1:
        each = 2 * (problem.ranks - 1) / problem.ranks * everything
        a, b = min(itertools.combinations(range(problem.ranks), 2), key=lambda pair: problem.network.between(*pair)[1])
        slowest = problem.network.between(a, b)[1]
        cut = sum(
            size(problem.profiles[0], stage.stop, stage.send) * problem.batch_size
            for stage, after in itertools.pairwise(plan.stages)
            if set(stage.ranks) != set(after.ranks)
            for size in (message_bytes, gradient_message_bytes)
        )
        lines.append(
            f"With ddp every rank would send {human_bytes(each)} of gradients a step, which the slowest link "
            f"({names[a]} to {names[b]}, {_mbit(slowest)}) takes {human_seconds(each / slowest)} for; between stages "
            f"of this plan {human_bytes(cut)} travel in all."
        )
    lines += _crowded(problem, names)
    size = max(plan.micro_sizes(problem.batch_size, problem.batch_size))
    working = {
        rank
        for stage in plan.stages
        for rank, (first, end) in zip(stage.ranks, stage.rows(size), strict=True)
        if first < end and _busy(problem, found, rank) >= _AS_GOOD_AS_NOTHING
    }
    ranks = dict.fromkeys(rank for stage in plan.stages for rank in stage.ranks)
    idle = [names[rank] for rank in ranks if rank not in working]
    if idle:
        lines.append(
            f"{', '.join(idle[:5])}{' and others' if len(idle) > 5 else ''}: as good as nothing to do, because sending "
            "work there, or waiting for it, would take longer than doing it elsewhere."
        )
    return lines


def _crowded(problem: Problem, names: Sequence[str]) -> list[str]:
    """Return sentences on machines whose ranks slow one another down by sharing caches and memory."""
    machines: dict[str, list[int]] = {}
    factors: dict[str, float] = {}
    for number, host in enumerate(problem.hosts):
        key = host.machine or f" {number}"
        machines.setdefault(key, []).extend(host.ranks)
        factors[key] = host.crowded
    lines = []
    for key, ranks in machines.items():
        if len(ranks) > 1 and factors[key] >= 1 + _AS_GOOD_AS_NOTHING:
            who = f"{names[ranks[0]]} {'and' if len(ranks) == 2 else 'to'} {names[ranks[-1]]}"
            lines.append(
                f"{who} share the caches and the memory of a machine: while all of them compute, each takes "
                f"{factors[key]:.2f} times as long as alone, as was measured."
            )
    return lines


def _who(names: Sequence[str], rank: int) -> str:
    return names[rank] if names[rank] == f"rank {rank}" else f"{names[rank]} (rank {rank})"


def _busy(problem: Problem, found: Candidate, rank: int) -> float:
    """Return the share of a step in which a rank computes; it is above 1 where the rank lacks the cores for that."""
    return problem.oversubscription[rank] * found.prediction.busy[rank] / found.prediction.seconds


def _slowest(problem: Problem, one: Stage, other: Stage) -> float:
    """Return the least bandwidth between members of two stages; it is infinite if all data stays on one rank."""
    links = (problem.network.between(a, b) for a in one.ranks for b in other.ranks if a != b)
    return min((link.bandwidth for link in links), default=math.inf)


def _mbit(bandwidth: float) -> str:
    return f"{8 * bandwidth / 1e6:,.0f} Mbit/s"


def alternatives(problem: Problem, names: Sequence[str]) -> dict[str, Candidate]:
    """Return simpler plans: data parallelism, an equal split of the layers, and the best single device."""
    evaluator = Evaluator(problem)
    found = {"ddp, equal shares": evaluator.judge(plain_ddp(problem))}
    splits = [plan for number in problem.micro_batches if (plan := equal_split(problem, number)) is not None]
    if splits and problem.ranks > 1:
        best = min((evaluator.judge(plan) for plan in splits), key=lambda one: one.prediction.seconds)
        found[f"equal split of the layers, {count(best.plan.micro_batches, 'micro-batch')}"] = best
    alone = fastest_alone(problem, evaluator)
    found[f"{names[alone.plan.stages[0].ranks[0]]} alone"] = alone
    return found


def shortage(problem: Problem, found: Candidate, names: Sequence[str]) -> str | None:
    """Return which device lacks how many bytes or samples for a plan, or None if the plan can be used."""
    short = found.prediction.lacking
    if not short:
        if not found.too_few_rows:
            return None
        return (
            f"a rank would get a single sample of a micro-batch, but the model needs {problem.profiles[0].least_rows}, "
            "as BatchNorm does"
        )
    worst = max(short, key=lambda rank: short[rank])
    others = len(short) - 1
    more = f" ({count(others, 'other rank')} also {'lacks' if others == 1 else 'lack'} memory)" if others else ""
    has = problem.memory[worst]
    there = (
        f"has {human_bytes(has)}"
        if has >= 0
        else f"its process already takes {human_bytes(-has)} more than there is for a rank"
    )
    return (
        f"{_who(names, worst)} lacks {human_bytes(short[worst])} of memory: it needs "
        f"{human_bytes(found.prediction.memory[worst])} and {there}{more}"
    )


def remedy(problem: Problem, found: Candidate) -> str:
    """Return the smallest change that would make an unusable plan usable."""
    if min(problem.memory.values()) < 0:
        return (
            "The processes alone take more memory than there is: fewer ranks on a machine, or more memory, are needed."
        )
    ahead = problem.loading.memory
    while ahead:
        ahead //= 2
        if Evaluator(replace(problem, loading=replace(problem.loading, memory=ahead))).judge(found.plan).usable:
            return f"With data.memory: {ahead} the plan fits, as fewer samples are loaded ahead of the step."
    own, evaluator = found.plan.micro_batches, Evaluator(problem)
    for other in sorted(MICRO_BATCHES, key=lambda number: abs(number - own)):
        if other <= problem.batch_size and evaluator.judge(replace(found.plan, micro_batches=other)).usable:
            return f"With parallel.micro_batches: {other} the same stages fit."
    own_constraints = problem.constraints
    unconstrained = Constraints(
        formats=own_constraints.formats,
        syncs=own_constraints.syncs,
        schedules=own_constraints.schedules,
        sync=Sync.ALL_REDUCE if own_constraints.sync.alone else own_constraints.sync,
    )
    problem = replace(problem, constraints=unconstrained)
    if search(problem, 60).usable:
        return "With parallel.strategy: auto there is a plan that fits."
    batch = problem.batch_size
    while batch > 1:
        batch //= 2
        if search(replace(problem, batch_size=batch), 60).usable:
            return f"With a batch_size of {batch} there is a plan that fits."
    return "No batch size would fit: more devices, or more memory, are needed."


def uncut(problem: Problem, layer: int, bond: str | None, layer_name: str) -> str | None:
    """Return a sentence about the largest `layer` if it leaves little for other stages to do, or None.

    `bond` is what prevents a cut, as returned by `Chain.bond`.
    """
    profile = problem.profiles[0]
    times = [sum(profile.seconds(index, profile.sizes[-1])) for index in range(problem.layers)]
    share = times[layer] / max(sum(times), 1e-12)
    if problem.ranks == 1 or bond is None or share <= _MOST_OF_THE_TIME:
        return None
    ddp = judge(problem, plain_ddp(problem)).prediction.seconds
    return (
        f"layer {layer} ({layer_name}) takes {share:.0%} of the time and cannot be cut, because {bond}: "
        f"stages would be unequal. With ddp a step is predicted to take {human_seconds(ddp)}"
    )


def largest_layer(profile: Profile) -> int:
    """Return the layer that takes the most time."""
    return max(range(len(profile.layers)), key=lambda layer: sum(profile.seconds(layer, profile.sizes[-1])))


def compare(problem: Problem, found: Candidate, names: Sequence[str]) -> list[str]:
    """Return how much faster or slower the plan is than simpler ones."""
    lines = []
    for name, other in _comparable(problem, found, names).items():
        ratio = other.prediction.seconds / found.prediction.seconds
        if other.plan.spare and set(other.plan.stages[0].ranks) == {r for s in found.plan.stages for r in s.ranks}:
            continue  # the plan is that already
        if round(ratio, 2) >= 1:
            note = "" if other.prediction.fits else ", and does not fit into memory"
            seconds = human_seconds(other.prediction.seconds)
            lines.append(f"{ratio:.2f} times as fast as {name} ({seconds} a step{note})")
        else:
            lines.append(_slower(name, other))
    return lines


def drawback(problem: Problem, found: Candidate, names: Sequence[str]) -> str | None:
    """Return which simpler plan is predicted to be clearly faster, in the words of `compare`; None if none is."""
    others = [(name, other) for name, other in _comparable(problem, found, names).items() if other.usable]
    if not others:
        return None
    name, best = min(others, key=lambda one: one[1].prediction.seconds)
    is_faster = best.prediction.seconds < (1 - _WORTH_A_WARNING) * found.prediction.seconds
    return _slower(name, best) if is_faster else None


def _comparable(problem: Problem, found: Candidate, names: Sequence[str]) -> dict[str, Candidate]:
    """Return the simpler plans, without those that were not chosen because their ranks outnumber the cores."""
    others, crowded = alternatives(problem, names), outnumbers_cores(problem, found.plan)
    if crowded or not found.plan.spare:
        return others
    return {name: other for name, other in others.items() if not outnumbers_cores(problem, other.plan)}


def _slower(name: str, other: Candidate) -> str:
    note = ": do not distribute this job" if other.plan.spare else ""
    note = note if other.prediction.fits else ", but does not fit into memory"
    return f"slower than {name}, which takes {human_seconds(other.prediction.seconds)} a step{note}"
