"""Explains a plan's stages, devices, schedule and micro-batches by how long a step would take with others.

Explains how much energy a plan takes, and what planning for energy or a deadline costs in time.

Explains what a plan leaves to the run, as only the devices can measure: threads and precision.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from horizonml.job.schema import Job
from horizonml.plan.execution import PLAIN, from_json, runs
from horizonml.plan.plan import Plan
from horizonml.plan.schedules import SCHEDULES
from horizonml.planner.evaluator import Candidate, Evaluator
from horizonml.planner.problem import Problem
from horizonml.planner.profile import Profile
from horizonml.planner.reasons import (
    Reason,
    accuracy_reason,
    hint,
    left_out,
    link_reasons,
    spare_reason,
    sum_reasons,
    why_left_out,
)
from horizonml.planner.saving import Energy, energy_of
from horizonml.text import count, human_seconds

_MOST_RANKS = 64  # for which a plan is compared with others like it
_SAME = 0.005  # of a step


def reasons(evaluator: Evaluator, found: Candidate, names: Sequence[str]) -> list[Reason]:
    """Return a reason for each choice of a plan; `names` are those of the ranks' devices."""
    problem, plan = evaluator.problem, found.plan
    if problem.ranks == 1 or any(stage.splits_channels for stage in plan.stages):
        return list(layer_reasons(problem.profiles[:1], names))
    lines: list[Reason | None] = [accuracy_reason(problem, found)]
    lines += list(energy_reasons(problem, found, names)) or [spare_reason(problem, found, names)]
    lines += [*link_reasons(evaluator, found), *sum_reasons(evaluator, found)]
    if problem.ranks <= _MOST_RANKS:
        lines += [hint(evaluator, found), *_order(evaluator, found), *_cuts(evaluator, found)]
    lines += [*_devices(evaluator, found, names), *layer_reasons(problem.profiles, names)]
    return [line for line in lines if line is not None]


def layer_reasons(profiles: Sequence[Profile], names: Sequence[str]) -> Iterator[Reason]:
    """Yield how layers run on each kind of device; `names` are those of the profiles' devices."""
    alike: dict[tuple[str, str], list[int]] = {}
    for number, profile in enumerate(profiles):
        alike.setdefault((str(profile.executions), f"{profile.gain:.2f}"), []).append(number)
    for numbers in alike.values():
        profile, first = profiles[numbers[0]], names[numbers[0]]
        where = "" if len(alike) == 1 else f" on {first}"
        if len(numbers) > 1 and where:
            where += f" and {count(len(numbers) - 1, 'other device')}"
        found = [run for run in runs(from_json(list(profile.executions))) if run.execution != PLAIN]
        if not found:
            text = f"All layers run{where} as PyTorch runs them by default."
            yield Reason("layers", "plain", text, brief=False)
            continue
        parts = []
        for run in found:
            last = run.stop - 1
            span = f"layers {run.start} to {last}" if last > run.start else f"layer {run.start}"
            verb = "run" if last > run.start else "runs"
            parts.append(f"{span} {verb} in {run.execution.words}")
        few = sum(run.stop - run.start for run in found) < len(profile.layers)
        rest = "; the rest run plain" if few else ""
        gain = ""
        if profile.gain > 1:
            gain = f". This makes all layers together {profile.gain:.2f} times as fast as if none ran so"
        what = " and ".join(parts)
        text = f"{what[0].upper()}{what[1:]}{where}{rest}{gain}."
        inexact = any(run.execution.precision != "fp32" for run in found)
        yield Reason("layers", what, text, exact=not inexact)


def work_of(plan: Plan, rank: int) -> str:
    """Return which layers a rank works on, and on which part of every micro-batch."""
    if rank in plan.spare:
        return "nothing (it is left out)"
    if len(plan.stages) == 1 and plan.world_size > 1:
        stage = plan.stages[0]
        return f"{stage.shares[stage.ranks.index(rank)] / sum(stage.shares):.0%} of the samples through all layers"
    parts = []
    for number in plan.stages_of(rank):
        stage = plan.stages[number]
        layers = f"layers {stage.start} to {stage.stop - 1}" if stage.stop - stage.start > 1 else f"layer {stage.start}"
        share = stage.shares[stage.ranks.index(rank)] / sum(stage.shares)
        if share < 1e-3:
            parts.append(f"no samples in {layers}")
        elif len(stage.ranks) > 1:
            parts.append(f"{layers} for {share:.0%} of the samples")
        else:
            parts.append(layers)
    return " and ".join(parts) or "nothing"


def _against(found: Candidate, others: Sequence[tuple[str, Candidate]]) -> str:
    """Return how much longer a step would take with other choices."""
    words = []
    for name, other in others:
        more = other.prediction.seconds / found.prediction.seconds - 1
        if not other.usable:
            words.append(f"{name} is not possible with this memory or batch size")
        elif abs(more) < _SAME:
            words.append(f"with {name} a step would take as long")
        else:
            words.append(f"with {name} a step would take {abs(more):.0%} {'longer' if more > 0 else 'less time'}")
    return ", and ".join(words)


def _order(evaluator: Evaluator, found: Candidate) -> Iterator[Reason]:
    """Yield the reasons for the number of micro-batches and for the schedule."""
    problem, plan = evaluator.problem, found.plan
    counts = problem.micro_batches
    chosen = count(plan.micro_batches, "micro-batch")
    if len(counts) == 1:
        yield Reason("micro-batches", str(plan.micro_batches), f"A batch has {chosen}, as the job says.", brief=False)
    elif plan.micro_batches in counts:
        place = counts.index(plan.micro_batches)
        near = [counts[other] for other in (place - 1, place + 1) if 0 <= other < len(counts)]
        others = [(str(number), evaluator.judge(replace(plan, micro_batches=number))) for number in near]
        text = f"A batch has {chosen}: {_against(found, others)}."
        yield Reason("micro-batches", str(plan.micro_batches), text)
    if len(plan.stages) == 1:
        return
    schedules = problem.constraints.schedules
    each = SCHEDULES[plan.schedule].stages_per_rank
    like = [name for name in schedules if name != plan.schedule and SCHEDULES[name].stages_per_rank == each]
    if not like:
        text = f"The schedule is {plan.schedule}" + (", as the job says." if len(schedules) == 1 else ".")
    else:
        others = [(name, evaluator.judge(replace(plan, schedule=name))) for name in like]
        text = f"The schedule is {plan.schedule}: {_against(found, others)}."
    yield Reason("schedule", plan.schedule, text, brief=bool(like))


def _cuts(evaluator: Evaluator, found: Candidate) -> Iterator[Reason]:
    """Yield the reasons for the layers of stages: what a step would take if each ended a layer earlier or later."""
    problem, plan = evaluator.problem, found.plan
    fixed = problem.constraints.cuts is not None
    for number, (stage, after) in enumerate(itertools.pairwise(plan.stages)):
        text = f"Stage {number} ends with layer {stage.stop - 1}"
        others = []
        for words, cut in (("its end a layer earlier", stage.stop - 1), ("its end a layer later", stage.stop + 1)):
            if stage.start < cut < after.stop:
                moved = (replace(stage, stop=cut), replace(after, start=cut))
                stages = (*plan.stages[:number], *moved, *plan.stages[number + 2 :])
                others.append((words, evaluator.judge(replace(plan, stages=stages))))
        if fixed or not others:
            why = ", as the job says." if fixed else ": there is no other cut."
        else:
            why = f": {_against(found, others)}."
        yield Reason("stage", f"layers {stage.start} to {stage.stop - 1}", text + why, brief=False, stage=number)


def _devices(evaluator: Evaluator, found: Candidate, names: Sequence[str]) -> Iterator[Reason]:
    """Yield what each device does, and how fast it is compared with the others."""
    problem, plan = evaluator.problem, found.plan
    rows = max(1, problem.batch_size // (plan.micro_batches * problem.ranks))
    times = {rank: evaluator.seconds(rank, 0, problem.layers, rows) for rank in found.prediction.busy}
    fastest = min(times.values())
    for rank, busy in sorted(found.prediction.busy.items()):
        part = min(1.0, problem.oversubscription[rank] * busy / found.prediction.seconds)
        speed = (
            "the fastest" if times[rank] <= fastest * 1.01 else f"at {fastest / times[rank]:.2f} of the fastest's speed"
        )
        name = names[rank] if names[rank] == f"rank {rank}" else f"{names[rank]} (rank {rank})"
        text = (
            f"{name}, {speed}, takes {work_of(plan, rank)}, and computes for {part:.0%} of a step "
            f"({human_seconds(part * found.prediction.seconds)})."
        )
        yield Reason("device", str(rank), text, brief=False)


def energy_reasons(problem: Problem, found: Candidate, names: Sequence[str]) -> Iterator[Reason]:
    """Yield what the plan's energy is, and why a plan other than the fastest was chosen, where watts are known."""
    energy = energy_of(problem, found.prediction)
    if energy is None:
        return
    yield Reason("energy", f"{energy.joules:.4g} J", _drawn(problem, found, energy))
    if found.fastest is not None:
        yield Reason("energy", problem.objective.kind, _chosen(problem, found, found.fastest, energy))
    if found.plan.spare:
        watts = sum(one.idle for rank in found.plan.spare if (one := problem.watts[rank]) is not None)
        text = (
            f"Left out: {left_out(names, found.plan.spare)}. {why_left_out(problem, found)} While they wait, the "
            f"devices left out draw {watts:.3g} W, which counts here."
        )
        off = sum(one.idle for rank in _could_be_off(problem, found) if (one := problem.watts[rank]) is not None)
        if off:
            which = "they" if off == watts else "those on machines where no rank works"
            text += f" Switched off, {which} would save {off * found.prediction.seconds:.3g} J a step more."
        yield Reason("energy", "left out", text)


def _could_be_off(problem: Problem, found: Candidate) -> list[int]:
    """Return the ranks that are left out and share their machine with no rank that works."""
    machine = {rank: host.machine or f" {number}" for number, host in enumerate(problem.hosts) for rank in host.ranks}
    spare = set(found.plan.spare)
    working = {machine[rank] for rank in range(problem.ranks) if rank not in spare}
    return [rank for rank in found.plan.spare if machine[rank] not in working]


def energy_facts(problem: Problem, found: Candidate) -> dict[str, Any] | None:
    """Return a plan's energy as a JSON object, or None where the watts of a device are not known."""
    energy = energy_of(problem, found.prediction)
    if energy is None:
        return None
    facts: dict[str, Any] = {
        "objective": problem.objective.kind,
        "joules_per_step": energy.joules,
        "joules_per_sample": energy.joules / problem.batch_size,
        "watts": energy.joules / found.prediction.seconds,
        "joules_by_rank": list(energy.by_rank),
        "left_out": list(found.plan.spare),
    }
    if found.fastest is not None:
        fastest = energy_of(problem, found.fastest.prediction)
        assert fastest is not None
        facts["fastest"] = {"seconds": found.fastest.prediction.seconds, "joules_per_step": fastest.joules}
    return facts


def _drawn(problem: Problem, found: Candidate, energy: Energy) -> str:
    """Return the energy of a step in words."""
    seconds = found.prediction.seconds
    return (
        f"A step takes {energy.joules:.3g} J ({energy.joules / problem.batch_size:.3g} J a sample, "
        f"{energy.joules / seconds:.3g} W on average): {energy.joules - energy.working:.3g} J for devices that are on, "
        f"and {energy.working:.3g} J for their work."
    )


def _chosen(problem: Problem, found: Candidate, fastest: Candidate, energy: Energy) -> str:
    """Return what the objective costs in time, and what it saves."""
    objective, seconds = problem.objective, found.prediction.seconds
    whole = fastest.prediction.seconds
    before = energy_of(problem, fastest.prediction)
    assert before is not None
    saved = 1 - energy.joules / before.joules
    if found.plan == fastest.plan:
        compared = "The fastest plan that was found also uses the least energy"
    else:
        time = f"{abs(seconds / whole - 1):.0%} {'longer' if seconds > whole else 'shorter'}"
        compared = (
            f"The fastest plan that was found takes {human_seconds(whole)} and {before.joules:.3g} J a step; "
            f"this one takes {human_seconds(seconds)} ({time}) and {saved:.0%} less energy"
        )
    if objective.kind == "deadline" and objective.deadline is not None:
        limit, takes = objective.limit(whole), human_seconds(seconds * objective.steps)
        if seconds > limit * (1 + 1e-9):
            return (
                f"No plan was found that meets the deadline of {human_seconds(objective.deadline)}: the fastest takes "
                f"{takes} for the run's {objective.steps:,} steps, and was chosen."
            )
        return f"{compared}. The run's {objective.steps:,} steps take {takes} of {human_seconds(objective.deadline)}."
    return f"{compared}. A step may take {objective.slowdown:g} times as long as the fastest (parallel.slowdown)."


def run_reasons(job: Job, threads: int | None, untried: str | None) -> Iterator[Reason]:
    """Yield what a run decides when it begins.

    `threads` are the most that a rank of this machine has cores for, None for devices on paper; `untried` says why a
    run of the job is not able to try what changes accuracy, if it is not.
    """
    own = job.parallel.threads
    if own is not None:
        yield Reason(
            "threads", str(own), f"Each rank computes with {count(own, 'thread')}, as the job says.", brief=False
        )
    elif threads == 1:
        yield Reason("threads", "1", "Each rank computes with one thread, because it has only one core.", brief=False)
    else:
        most = f" (1 to {threads})" if threads is not None else ""
        text = f"When the run begins, each device measures how many threads{most} make its ranks fastest."
        yield Reason("threads", "tried", text, brief=False)
    if job.precision == "auto" and untried is not None:
        text = f"With precision: auto, this run computes all layers in fp32, because {untried}."
        yield Reason("precision", "fp32", text)
    elif job.precision == "auto":
        text = (
            "With precision: auto, this plan is for fp32. The run tries bf16 on a warm-up, on devices where it is "
            "faster, and uses it if held-out accuracy does not suffer."
        )
        yield Reason("precision", "tried", text)
