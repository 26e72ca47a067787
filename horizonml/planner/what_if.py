"""Plans a run again on paper, with other devices and links, and says in words what changes and why."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from horizonml.errors import HorizonError, JobError, PlanError
from horizonml.job.schema import Job
from horizonml.planner.changes import Changed, Changes, apply_changes
from horizonml.planner.choose import choose, energy_facts, is_better
from horizonml.planner.evaluator import Candidate, Evaluator, OutOfTime, judge
from horizonml.planner.explain import explain, explain_parts, rows
from horizonml.planner.problem import Problem, check_watts
from horizonml.planner.reasons import Told, longer, shortage, work_of
from horizonml.planner.record import Planning
from horizonml.planner.strategies import constraints_of
from horizonml.text import count, human_seconds, nearest

STRATEGIES = ("auto", "ddp", "hybrid", "pipeline")  # that can be predicted for any devices
_MOST_TOLD = 12  # devices whose work is told one by one
_SAME = 0.005  # a step time that differs by less is the same


@dataclass(frozen=True)
class WhatIfAnswer:
    """Holds the present plan, and the one that is predicted to be best after the changes."""

    planning: Planning
    problem: Problem  # the devices and links as they are
    changed: Changed
    present: Candidate
    found: Candidate
    strategy: str  # by which it was planned
    notes: tuple[str, ...]
    took: float  # seconds of planning

    @property
    def ratio(self) -> float:
        """Return the predicted time of a step after the changes over that of the present plan."""
        return self.found.prediction.seconds / self.present.prediction.seconds

    def changes(self) -> list[str]:
        """Return, in sentences, how the plan differs from the present one."""
        before, after = self.present.prediction.seconds, self.found.prediction.seconds
        instead = f"{human_seconds(after)} instead of {human_seconds(before)}"
        step = f"A step is predicted to take {instead}: {longer(after, before)}."
        return [step, *_devices(self), *_work(self)]

    def reasons(self) -> list[str]:
        """Return the planner's explanation of the plan."""
        evaluator = Evaluator(self.changed.problem)
        return [one.text for one in explain(evaluator, self.found, self.changed.names, Told.WHAT_IF)]


def plan_again(planning: Planning, changes: Changes, strategy: str | None, seconds: float) -> WhatIfAnswer:
    """Return what the planner makes of a run's devices and links after some changes, within so many `seconds`.

    The strategy is the job's own unless another one is asked for, or unless it fixes what the changes make impossible.
    Raises HorizonError, also if time runs out.
    """
    problem = planning.problem
    if problem is None:
        raise HorizonError(
            f"nothing was measured for this run, because its strategy, {planning.job.parallel.strategy}, leaves "
            "nothing to choose. Train it with --set parallel.strategy=auto, which measures devices and links when it "
            "begins, or plan for devices that you describe: horizonml plan JOB --devices FILE"
        )
    began = time.monotonic()
    job, notes = _job(planning, bool(changes.add or changes.remove), strategy)
    if not planning.measured:
        problem = _with_links(planning, problem, changes)
        notes.append(
            f"Strategy {planning.job.parallel.strategy} measures nothing: an earlier profile of rank 0's device stands "
            "for all. With strategy auto, every device and link is measured."
        )
    changed = apply_changes(planning, problem, changes)
    constraints = constraints_of(job.parallel)
    if planning.tried is not None:
        constraints = constraints.after(planning.tried)
    changed = replace(changed, problem=replace(changed.problem, constraints=constraints))
    check_watts(changed.problem.objective, changed.problem.watts, changed.names)
    evaluator = Evaluator(changed.problem, began + seconds)
    try:
        found = choose(job, changed.problem, evaluator)
        if job is planning.job and not (changes.add or changes.remove):
            kept = evaluator.judge(planning.plan)
            if changed.problem.objective.kind == "time":
                found = min((kept, found), key=lambda one: one.cost)
            elif kept.usable and not is_better(changed.problem, found, kept, 0.0):
                found = replace(kept, fastest=found.fastest)
    except OutOfTime:
        raise PlanError(
            f"no plan was found within {human_seconds(seconds)}: the more devices and layers, the longer it takes; "
            "allow more seconds, or ask for fewer devices"
        ) from None
    present = judge(problem, planning.plan)
    notes += _doubts(planning, problem, changed, present, found)
    return WhatIfAnswer(
        planning, problem, changed, present, found, job.parallel.strategy, tuple(notes), time.monotonic() - began
    )


def _job(planning: Planning, other_devices: bool, strategy: str | None) -> tuple[Job, list[str]]:
    """Return the job that is planned for: the run's own, or one with a strategy that allows other devices."""
    job, own = planning.job, planning.job.parallel.strategy
    if strategy is not None and strategy not in STRATEGIES:
        close = nearest(strategy[:40], STRATEGIES)
        raise JobError(f"strategy: {ascii(strategy)[:40]} must be one of {', '.join(STRATEGIES)}{close}")
    fixed = job.parallel.stages is not None
    if strategy is None:
        if not other_devices or (own in STRATEGIES and not fixed):
            return job, []
        strategy = "auto"
        reason = "its stages are fixed for its own ranks" if fixed else f"strategy {own} cannot be predicted"
        notes = [f"This is the best plan of any kind (strategy auto), because the job's own does not apply: {reason}."]
    else:
        if strategy == own and not fixed:
            return job, []
        notes = [f"This is a plan of strategy {strategy}; the run's is {'fixed stages' if fixed else own}."]
    parallel = {"strategy": strategy, "stages": None, "workers": None, "min_workers": None, "max_workers": None}
    return job.model_copy(update={"parallel": job.parallel.model_copy(update=parallel)}), notes


def _with_links(planning: Planning, problem: Problem, changes: Changes) -> Problem:
    """Return the problem with the links that the question tells, where they were not measured. Raises HorizonError."""
    told = [rate for rate in changes.rates if not rate.ranks]
    if told:
        return apply_changes(planning, problem, Changes(rates=(told[0],))).problem
    if len(problem.hosts) > 1:
        raise HorizonError(
            "rate: the links of this run were not measured, because its strategy, "
            f"{planning.job.parallel.strategy}, leaves nothing to choose; say how fast they are, such as all=100Mbit"
        )
    return problem


def _doubts(planning: Planning, problem: Problem, changed: Changed, present: Candidate, found: Candidate) -> list[str]:
    """Return what should be known before the prediction is believed."""
    notes = []
    if planning.measured and problem.constraints.one_profile:
        notes.append(
            f"Strategy {planning.job.parallel.strategy} measured one device, whose speed stands for all, and the "
            "slowest link. With strategy auto, every device and link is measured."
        )
    lack = shortage(changed.problem, found, list(changed.names))
    if lack is not None:
        notes.append(f"No plan was found that these devices can carry out: {lack}.")
    if changed.problem.ranks == planning.plan.world_size and changed.origins == tuple(range(changed.problem.ranks)):
        today = judge(problem, found.plan)
        if today.usable and today.prediction.seconds < (1 - _SAME) * present.prediction.seconds:
            notes.append(
                "This plan would be faster even without the change: "
                f"{human_seconds(today.prediction.seconds)} a step instead of "
                f"{human_seconds(present.prediction.seconds)}."
            )
    return notes


def _devices(answer: WhatIfAnswer) -> list[str]:
    """Return which devices go, and which come."""
    names, origins = answer.planning.names, answer.changed.origins
    lines = []
    gone = [f"rank {rank} ({name})" for rank, name in enumerate(names) if rank not in origins]
    if gone:
        lines.append(f"{_several(gone)} {'leave' if len(gone) > 1 else 'leaves'}; the others are numbered anew.")
    new = [f"{answer.changed.names[rank]} as rank {rank}" for rank, origin in enumerate(origins) if origin is None]
    if new:
        lines.append(f"{_several(new)} {'join' if len(new) > 1 else 'joins'}.")
    return lines


def _work(answer: WhatIfAnswer) -> list[str]:
    """Return how the plan itself differs, device by device."""
    before, after, names = answer.present.plan, answer.found.plan, answer.changed.names
    lines = []
    if len(before.stages) != len(after.stages):
        verb = "is" if len(after.stages) == 1 else "are"
        lines.append(f"There {verb} {count(len(after.stages), 'stage')} instead of {len(before.stages)}.")
    if len(after.stages) > 1:
        if before.schedule != after.schedule and len(before.stages) > 1:
            lines.append(f"The schedule is {after.schedule} instead of {before.schedule}.")
        if before.micro_batches != after.micro_batches:
            lines.append(
                f"A batch is cut into {count(after.micro_batches, 'micro-batch')} instead of {before.micro_batches}."
            )
    moved = []
    for rank, origin in enumerate(answer.changed.origins):
        does, did = work_of(after, rank), work_of(before, origin) if origin is not None else None
        if did is None:
            moved.append(f"{names[rank]} takes {does}.")
        elif did != does:
            moved.append(f"{names[rank]} takes {does} instead of {did}.")
    if not moved:
        lines.append("The plan stays as it is." if before == after else "Every device does what it does now.")
    if len(moved) > _MOST_TOLD:
        others = count(len(moved) - _MOST_TOLD + 1, "other device")
        moved = [*moved[: _MOST_TOLD - 1], f"The work of {others} changes, too."]
    return lines + moved


def _several(words: Sequence[str]) -> str:
    shown = list(words) if len(words) <= 5 else [*words[:4], f"{len(words) - 4} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def plan_facts(
    problem: Problem, found: Candidate, names: Sequence[str], layers: Sequence[str], origins: Sequence[int | None]
) -> dict[str, object]:
    """Return a plan with what it is predicted to cost, as a JSON object for people and pages."""
    plan, prediction = found.plan, found.prediction
    everything = [sum(problem.profiles[0].seconds(layer, 1)) for layer in range(problem.layers)]
    devices = []
    for rank, name in enumerate(names):
        own = [sum(problem.profiles[rank].seconds(layer, 1)) for layer in range(problem.layers)]
        speed = sum(everything) / sum(own) if sum(own) > 0 else 1.0
        memory = problem.memory[rank]
        devices.append(
            {
                "rank": rank,
                "name": name,
                "was": origins[rank],
                "speed": round(speed, 4),
                "memory": memory if math.isfinite(memory) else None,
                "needs": prediction.memory.get(rank, 0.0),
                "busy": min(1.0, problem.oversubscription[rank] * prediction.busy.get(rank, 0.0) / prediction.seconds),
            }
        )
    stages = [
        {
            "start": stage.start,
            "stop": stage.stop,
            "layers": list(layers[stage.start : stage.stop]),
            "ranks": list(stage.ranks),
            "shares": [share / sum(stage.shares) for share in stage.shares],
            "sync": stage.sync.name,
            "send": stage.send,
        }
        for stage in plan.stages
    ]
    return {
        "plan": plan.to_json(),
        "stages": stages,
        "table": rows(problem, found, names, layers),
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "devices": devices,
        "links": [
            {"from": a, "to": b, "bandwidth": link.bandwidth, "latency": link.latency}
            for a in range(problem.ranks)
            for b in range(problem.ranks)
            if a != b
            for link in [problem.network.between(a, b)]
        ],
        "seconds": prediction.seconds,
        "samples_per_second": problem.batch_size / prediction.seconds,
        "parts": prediction.parts,
        "parts_text": explain_parts(found),
        "energy": energy_facts(problem, found),
        "fits": found.usable,
    }
