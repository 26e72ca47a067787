"""Explains how much energy a plan takes, and what planning for energy or a deadline costs in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from horizonml.planner.energy import Energy, energy_of
from horizonml.planner.evaluator import Candidate
from horizonml.planner.problem import Problem
from horizonml.planner.reasons import Reason, left_out, why_left_out
from horizonml.text import human_seconds


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
