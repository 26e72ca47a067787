"""Compares a plan with others: with simpler ones, and with those that would fit into the devices' memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from horizonml.plan.syncs import Sync
from horizonml.planner.evaluator import Candidate, Evaluator, judge
from horizonml.planner.problem import MICRO_BATCHES, Constraints, Problem
from horizonml.planner.reasons import Reason, devices
from horizonml.planner.search import equal_split, plain_ddp, search
from horizonml.planner.subset import fastest_alone, outnumbers_cores
from horizonml.text import count, human_bytes, human_seconds

_WORTH_A_WARNING = 0.05  # of a step: what a simpler plan saves at least
_MOST_OF_THE_TIME = 0.5  # a layer that takes more than this part leaves little to share out


def alternatives(problem: Problem, names: Sequence[str]) -> dict[str, Candidate]:
    """Return simpler plans: data parallelism, an equal split of the layers, and the best single device."""
    evaluator = Evaluator(problem)
    found = {"ddp and equal shares": evaluator.judge(plain_ddp(problem))}
    splits = [plan for number in problem.micro_batches if (plan := equal_split(problem, number)) is not None]
    if splits and problem.ranks > 1:
        best = min((evaluator.judge(plan) for plan in splits), key=lambda one: one.prediction.seconds)
        found[f"an equal split of the layers and {count(best.plan.micro_batches, 'micro-batch')}"] = best
    alone = fastest_alone(problem, evaluator)
    found[f"{names[alone.plan.stages[0].ranks[0]]} alone"] = alone
    return found


def compare(problem: Problem, found: Candidate, names: Sequence[str]) -> Reason:
    """Return the row of the simpler plans that a plan can be compared with."""
    others, best = _comparable(problem, found, names)
    working = {rank for stage in found.plan.stages for rank in stage.ranks}
    others = {  # without the plan itself
        name: other
        for name, other in others.items()
        if not other.plan.spare or set(other.plan.stages[0].ranks) != working
    }
    seconds = {name: other.prediction.seconds if other.usable else None for name, other in others.items()}
    advice = ["do not distribute this job"] if best is not None and others.get(best, found).plan.spare else []
    return Reason("plan", "simpler", "Simpler plans", seconds=found.prediction.seconds, others=seconds, notes=advice)


def drawback(problem: Problem, found: Candidate, names: Sequence[str]) -> str | None:
    """Return which simpler plan is predicted to be clearly faster, in words; None if none is."""
    others, best = _comparable(problem, found, names)
    if best is None or others[best].prediction.seconds >= (1 - _WORTH_A_WARNING) * found.prediction.seconds:
        return None
    advice = ": do not distribute this job" if others[best].plan.spare else ""
    return f"slower than {best}, which takes {human_seconds(others[best].prediction.seconds)} a step{advice}"


def _comparable(problem: Problem, found: Candidate, names: Sequence[str]) -> tuple[dict[str, Candidate], str | None]:
    """Return simpler plans by name, and which of them is faster than the plan, if one is.

    Those that were not chosen because their ranks outnumber the cores do not count.
    """
    others, crowded = alternatives(problem, names), outnumbers_cores(problem, found.plan)
    if found.plan.spare and not crowded:
        others = {name: other for name, other in others.items() if not outnumbers_cores(problem, other.plan)}
    usable = {name: other.prediction.seconds for name, other in others.items() if other.usable}
    best = min(usable, key=usable.__getitem__, default=None)
    return others, best if best is not None and round(found.prediction.seconds / usable[best], 2) > 1 else None


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
        f"{devices(names, [worst])} lacks {human_bytes(short[worst])} of memory: it needs "
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


def uncut(problem: Problem, bond: Callable[[int], str | None], layer_names: Sequence[str]) -> str | None:
    """Return a sentence about the largest layer if it leaves little for other stages to do, or None.

    `bond` returns what prevents a cut of a layer, as `Chain.bond` does.
    """
    profile = problem.profiles[0]
    times = [sum(profile.seconds(layer, profile.sizes[-1])) for layer in range(problem.layers)]
    layer = max(range(problem.layers), key=times.__getitem__)
    share, why = times[layer] / max(sum(times), 1e-12), bond(layer)
    if problem.ranks == 1 or why is None or share <= _MOST_OF_THE_TIME:
        return None
    ddp = judge(problem, plain_ddp(problem)).prediction.seconds
    return (
        f"layer {layer} ({layer_names[layer]}) takes {share:.0%} of the time and cannot be cut, because {why}: "
        f"stages would be unequal. With ddp a step is predicted to take {human_seconds(ddp)}"
    )
