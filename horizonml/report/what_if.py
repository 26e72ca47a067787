"""Answers "what if": how a run would be planned with other devices or links, and how long a step would then take.

The answer is made from what the run's folder says, on paper: nothing is measured, and the run does not notice. It takes
as long as planning, which is up to some seconds for a handful of devices.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from horizonml.errors import HorizonError, JobError
from horizonml.planner.changes import read_changes
from horizonml.planner.record import read_planning
from horizonml.planner.what_if import plan_again, plan_facts
from horizonml.report.live import LiveRun

MOST_SECONDS = 600.0
_asking = threading.Lock()  # planning takes a core, and the run may be on this machine


def what_if(
    folder: Path,
    add: Sequence[str] = (),
    remove: Sequence[str | int] = (),
    rates: Mapping[str, str] | None = None,
    strategy: str | None = None,
    seconds: float = 30.0,
) -> dict[str, object]:
    """Return the run's present plan and the one after some changes as a JSON object; see `planner.changes`.

    `strategy` asks for a plan of another kind. Planning may take so many `seconds`, and only one answer is made at a
    time in a process. Raises HorizonError, which names what is wrong with the question, or what the folder lacks.
    """
    if not 0 < seconds <= MOST_SECONDS:  # which no NaN is
        raise JobError(f"seconds: {seconds} is not from 0 to {MOST_SECONDS:g}")
    if not _asking.acquire(blocking=False):
        raise HorizonError("another what-if is being answered; ask again in a few seconds")
    try:
        planning = read_planning(folder)
        if planning is None:
            if not any(folder.glob("rank-*.jsonl")):
                raise HorizonError(f"{folder} has no records of a run (rank-*.jsonl)")
            raise HorizonError(
                f"{folder} does not say what the run was planned for (planning.json): it was recorded by an older "
                "version, or on another machine, that of rank 0. Train on with this version, or look there"
            )
        changes = read_changes(planning, add, remove, rates or {})
        answer = plan_again(planning, changes, strategy, seconds)
        run = LiveRun(folder)
        run.poll()
        measured = run.step_seconds
        origins = range(len(planning.devices))
        present = plan_facts(answer.problem, answer.present, planning.names, planning.layers, origins)
        predicted = plan_facts(
            answer.changed.problem, answer.found, answer.changed.names, planning.layers, answer.changed.origins
        )
        predicted["scaled_seconds"] = measured * answer.ratio if measured is not None else None
        return {
            "run": run.name,
            "strategy": answer.strategy,
            "present": {**present, "measured_seconds": measured, "since_step": planning.step},
            "predicted": predicted,
            "ratio": answer.ratio,
            "changes": answer.changes(),
            "why": answer.reasons(),
            "notes": list(answer.notes),
            "planning_seconds": answer.took,
        }
    finally:
        _asking.release()
