"""Explains each choice of a plan in a sentence: its reason, what it costs, and whether it is exact.

The reasons for what links carry and how members agree stand here; `shape_reasons` has those for stages, devices, the
schedule and micro-batches.

It also predicts what travels in a step of a plan: between stages, among the members of stages, and from each rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from horizonml.plan.execution import Execution, from_json
from horizonml.plan.gradients import TREE_BYTES, TREE_BYTES_ON_ONE_HOST, tree_messages
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.plan.syncs import FORMATS
from horizonml.planner.cost import (
    LayerTimes,
    gradient_message_bytes,
    is_lossy,
    message_bytes,
    synced_bytes,
    syncs_of,
    trained_bytes,
)
from horizonml.planner.evaluator import Candidate, Evaluator
from horizonml.planner.outer import outer_bytes
from horizonml.planner.problem import Problem
from horizonml.planner.refine import with_stage
from horizonml.planner.tasks import TaskMaker
from horizonml.text import count, human_bytes, human_seconds


@dataclass(frozen=True)
class Traffic:
    """Holds the bytes of a step; with local steps, of an average one."""

    boundaries: tuple[float, ...]  # between each stage and the next, both ways, whoever sends them
    sums: tuple[tuple[float, ...], ...]  # that each member of each stage sends so that the members agree
    ranks: dict[int, float]  # that each rank sends in all


def traffic(problem: Problem, plan: Plan) -> Traffic:
    """Return what travels in a step of a plan with a full batch."""
    sent = dict.fromkeys((rank for stage in plan.stages for rank in stage.ranks), 0.0)
    between = [0.0] * (len(plan.stages) - 1)
    for rank, tasks in TaskMaker(problem, plan, LayerTimes(problem.profiles)).tasks().items():
        for task in tasks:
            size = sum(each for peer, each in task.sends if peer != rank)
            if size:
                sent[rank] += size
                between[min(task.action.stage, task.receiver)] += size
    sums = tuple(tuple(summed_bytes(problem, plan, stage)) for stage in plan.stages)
    for stage, own in zip(plan.stages, sums, strict=True):
        for rank, size in zip(stage.ranks, own, strict=True):
            sent[rank] += size
    return Traffic(tuple(between), sums, sent)


def boundary_bytes(problem: Problem, stop: int, send: str) -> float:
    """Return the bytes that a sample takes in the format `send` across the cut before layer `stop`, both ways."""
    profile = problem.profiles[0]
    return message_bytes(profile, stop, send) + gradient_message_bytes(profile, stop, send)


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


_MOST_NAMED = 5  # devices
_NOTHING = 0.02  # of a step
_WORTH_TELLING = 0.05  # of a step: what an exact plan could save by a choice that it may not make


@dataclass(frozen=True)
class Reason:
    """Explains one choice of a plan."""

    about: str  # such as "link", "sum", "local steps", "stage", "device", "schedule", "layers", "threads", "accuracy"
    choice: str
    text: str
    exact: bool = True
    brief: bool = True  # whether it is told without being asked for
    stage: int | None = None  # that it is about; of a link, the one before it
    bytes_per_sample: float | None = None
    seconds_saved: float | None = None  # of a step, against the exact choice in the same plan

    def to_json(self) -> dict[str, Any]:
        """Return the reason as a JSON object, without what it does not say."""
        return {key: value for key, value in asdict(self).items() if value is not None and key != "brief"}


def link_reasons(evaluator: Evaluator, found: Candidate) -> Iterator[Reason]:
    """Yield a reason for the format on each link between stages; links that carry the same exact values share one."""
    problem, plan = evaluator.problem, found.plan
    exact = 0.0
    for number, (stage, after) in enumerate(zip(plan.stages, plan.stages[1:], strict=False)):
        if stage.ranks == after.ranks:
            continue
        size = boundary_bytes(problem, stage.stop, stage.send)
        whole = boundary_bytes(problem, stage.stop, "fp32")
        words = f"Stages {number} and {number + 1} exchange"
        link = f"their slowest link has {_mbit(_slowest(problem, stage, after))}"
        if stage.send == "fp32":
            exact += size * problem.batch_size
            text = f"{words} exact 32-bit floats, {human_bytes(size)} for each sample; {link}."
            yield Reason("link", "fp32", text, brief=False, stage=number, bytes_per_sample=size)
            continue
        other = evaluator.judge(with_stage(plan, number, replace(stage, send="fp32")))
        saved = other.prediction.seconds - found.prediction.seconds
        what, error = FORMATS[stage.send].what, FORMATS[stage.send].error
        text = (
            f"{words} {stage.send} ({what}): {human_bytes(size)} for each sample instead of {human_bytes(whole)}, "
            f"which makes a step {human_seconds(max(0.0, saved))} shorter, because {link}; {error}."
        )
        yield Reason("link", stage.send, text, False, True, number, size, saved)
    if exact:
        may = " (fewer bits would save next to nothing)" if len(problem.constraints.formats) > 1 else ""
        others = "The other links" if any(stage.send != "fp32" for stage in plan.stages[:-1]) else "Links"
        text = f"{others} between stages carry exact 32-bit floats, {human_bytes(exact)} a step{may}."
        yield Reason("links", "fp32", text)


def sum_reasons(evaluator: Evaluator, found: Candidate) -> Iterator[Reason]:
    """Yield a reason for the way in which the members of each stage agree."""
    problem, plan = evaluator.problem, found.plan
    if plan.local is not None:
        yield _local_reason(evaluator, found)
        return
    for number, stage in enumerate(plan.stages):
        if len(stage.ranks) == 1 or stage.splits_channels or not trained_bytes(problem.profiles[0], stage):
            continue
        size = sum(summed_bytes(problem, plan, stage)) / problem.batch_size
        who = f"The {len(stage.ranks)} members of stage {number}" if len(plan.stages) > 1 else "The ranks"
        link = f"the slowest link among them has {_mbit(_slowest(problem, stage, stage))}"
        if not is_lossy(stage):
            may = ", as fewer bits would save next to nothing" if len(syncs_of(problem)) > 1 else ""
            text = f"{who} sum exact gradients, {human_bytes(size)} for each sample{may}; {link}."
            yield Reason("sum", stage.sync.name, text, stage=number, bytes_per_sample=size)
            continue
        exact = with_stage(plan, number, replace(stage, sync=stage.sync.exactly))
        whole = sum(summed_bytes(problem, exact, exact.stages[number])) / problem.batch_size
        saved = evaluator.judge(exact).prediction.seconds - found.prediction.seconds
        what, error = stage.sync.what, stage.sync.error
        text = (
            f"{who} sum gradients as {what}: {human_bytes(size)} for each sample instead of {human_bytes(whole)}, "
            f"which makes a step {human_seconds(max(0.0, saved))} shorter, because {link}; {error}."
        )
        yield Reason("sum", stage.sync.name, text, False, True, number, size, saved)


def _local_reason(evaluator: Evaluator, found: Candidate) -> Reason:
    """Return the reason for local steps."""
    problem, plan = evaluator.problem, found.plan
    assert plan.local is not None
    local = plan.local
    in_step = replace(plan, local=None, stages=tuple(replace(s, sync=Sync.ALL_REDUCE) for s in plan.stages))
    size, whole = (
        sum(sum(summed_bytes(problem, one, stage)) for stage in one.stages) / problem.batch_size
        for one in (plan, in_step)
    )
    together = evaluator.judge(in_step).prediction.seconds
    saved = together - found.prediction.seconds
    who = "Ranks" if len(plan.stages) == 1 else f"{len(plan.stages[0].ranks)} replicas of the pipeline"
    parts = f", in {local.fragments} fragments" if local.fragments > 1 else ""
    late = f", and are applied {count(local.delay, 'step')} late" if local.delay else ""
    what = {"fp32": "32-bit floats", "int4": "4-bit numbers"}.get(local.format, f"the largest values ({local.format})")
    text = (
        f"{who} train independently, and synchronise every {local.every} steps (changes of parameters travel as "
        f"{what}{parts}{late}): {human_bytes(size)} for each sample instead of {human_bytes(whole)}. If this plan "
        f"summed gradients in every step instead, a step would take {human_seconds(max(0.0, saved))} longer, because "
        f"the slowest link among them has {_mbit(min(_slowest(problem, stage, stage) for stage in plan.stages))}."
    )
    return Reason("local steps", f"every {local.every} steps", text, False, True, None, size, saved)


def inexact_parts(plan: Plan) -> list[str]:
    """Return in words what of a plan is not exact."""
    parts = []
    for number, stage in enumerate(plan.stages):
        if number + 1 < len(plan.stages) and stage.send != "fp32" and stage.ranks != plan.stages[number + 1].ranks:
            parts.append(f"{stage.send} between stages {number} and {number + 1}")
        if is_lossy(stage) and not stage.sync.steps_alone:
            where = f" in stage {number}" if len(plan.stages) > 1 else ""
            parts.append(f"sums of gradients by {stage.sync.name}{where}")
    if plan.local is not None:
        parts.append(f"local steps (every {plan.local.every})")
    return parts


def inexact_layers(executions: Iterable[Sequence[Execution]]) -> list[str]:
    """Return in words how many layers run in fewer bits on a device; `executions` are those of each device."""
    layers = {number for own in executions for number, one in enumerate(own) if one.precision != "fp32"}
    return [f"{count(len(layers), 'layer')} in bf16"] if layers else []


def asked_reason(parts: Sequence[str]) -> Reason | None:
    """Return the sentence on `parts` of a plan that are not exact because the job asks for them; None for none."""
    if not parts:
        return None
    text = f"Not everything is exact, because the job asks for this: {', '.join(parts)}."
    return Reason("accuracy", "asked for", text, exact=False)


def chosen_inexact(problem: Problem, plan: Plan) -> bool:
    """Return whether the planner itself has chosen something that is not exact, because the job allows it."""
    constraints = problem.constraints
    if constraints.is_exact:
        return False
    links = len(constraints.formats) > 1 and any(stage.send != constraints.formats[0] for stage in plan.stages[:-1])
    sums = any(stage.sync in constraints.syncs for stage in plan.stages)
    return links or sums or (plan.local is not None and constraints.local is None)


def accuracy_reason(problem: Problem, found: Candidate) -> Reason | None:
    """Return what a plan that is not exact may cost in accuracy, and what an exact one costs; None for exact plans."""
    ways = {str(profile.executions): list(profile.executions) for profile in problem.profiles}
    layers = inexact_layers(from_json(own) for own in ways.values())
    parts = [*inexact_parts(found.plan), *layers]
    if not parts or not chosen_inexact(problem, found.plan):
        return asked_reason(parts)
    what = ", ".join(parts)
    instead = ""
    if found.exact_seconds is not None and not layers:
        less = found.exact_seconds / found.prediction.seconds
        instead = f", and a step would take {human_seconds(found.exact_seconds)} ({less:.1f} times as long)"
    tried = f" {problem.constraints.trial}"
    if found.plan.local is not None:
        tried = " A warm-up is too short to show what local steps cost: watch the held-out accuracy."
    fields = "parallel.exact: true and precision: fp32" if layers else "parallel.exact: true"
    text = f"These are not exact: {what}.{tried} With {fields} everything would be exact{instead}."
    return Reason("accuracy", "chosen", text, exact=False)


def left_out(names: Sequence[str], ranks: Sequence[int]) -> str:
    """Return the devices of some ranks in words; `names` are those of all ranks' devices."""
    who = [names[rank] if names[rank] == f"rank {rank}" else f"{names[rank]} (rank {rank})" for rank in ranks]
    return ", ".join(who[:_MOST_NAMED]) + (f" and {len(who) - _MOST_NAMED} more" if len(who) > _MOST_NAMED else "")


def why_left_out(problem: Problem, found: Candidate) -> str:
    """Return why a plan leaves devices out, as a sentence."""
    who, whom = ("it", "it") if len(found.plan.spare) == 1 else ("they", "them")
    if found.everyone_seconds == math.inf:
        return "No plan for all devices is possible: memory is short, or a batch has too few samples."
    if found.everyone_seconds is not None:
        more = found.everyone_seconds / found.prediction.seconds - 1
        if more < _NOTHING:
            return "Together with them, a step would take about as long."
        if len(found.plan.spare) == problem.ranks - 1:
            return f"One rank trains alone: divided among all, a step would take {more:.0%} longer."
        return f"If {who} took part, a step would take {more:.0%} longer, because the others would wait for {whom}."
    if problem.objective.kind == "time":
        return f"{who.capitalize()} would slow the others down."
    return "The others need fewer joules for the work."


def spare_reason(problem: Problem, found: Candidate, names: Sequence[str]) -> Reason | None:
    """Return which devices a plan leaves out and why, where no watts are known; None if it leaves none out."""
    if not found.plan.spare:
        return None
    text = f"Left out: {left_out(names, found.plan.spare)}. {why_left_out(problem, found)}"
    return Reason("device", "left out", text)


def hint(evaluator: Evaluator, found: Candidate) -> Reason | None:
    """Return what fewer bits on links would save in an exact plan of strategy auto, where that is worth telling."""
    problem, plan = evaluator.problem, found.plan
    constraints = problem.constraints
    if constraints.ordered or constraints.stages is not None or inexact_parts(plan) or len(plan.stages) == 1:
        return None
    stages = tuple(replace(stage, send="int8") for stage in plan.stages)
    other = evaluator.judge(replace(plan, stages=stages)).prediction.seconds
    if other > (1 - _WORTH_TELLING) * found.prediction.seconds:
        return None
    text = (
        f"All of this is exact. With parallel.exact: false, links could carry fewer bits: with 8 bits, a step of this "
        f"plan takes {human_seconds(other)} instead of {human_seconds(found.prediction.seconds)}."
    )
    return Reason("accuracy", "exact", text)


def _slowest(problem: Problem, one: Stage, other: Stage) -> float:
    """Return the least bandwidth between members of two stages; it is infinite if all data stays on one rank."""
    links = (problem.network.between(a, b) for a in one.ranks for b in other.ranks if a != b)
    return min((link.bandwidth for link in links), default=float("inf"))


def _mbit(bandwidth: float) -> str:
    rate = 8 * bandwidth / 1e6
    return f"{rate:,.0f} Mbit/s" if rate >= 10 or rate == 0 else f"{rate:.1f} Mbit/s"
