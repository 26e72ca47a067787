"""Implements `horizonml.plan`: the plan for a job, with what it is predicted to cost."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from horizonml.api.given import in_this_process
from horizonml.api.jobs import DataLike, JobLike, ModelLike, TaskLike, make_job
from horizonml.job.jobfile import write_plan
from horizonml.plan.plan import Plan
from horizonml.planner.explain import explain_parts
from horizonml.planner.reasons import Told, compare
from horizonml.runtime.planning import Planned, plan_job
from horizonml.text import count, human_seconds

_MOST_EXPLAINED = 200  # ranks


@dataclass(frozen=True, repr=False)
class PlannedJob:
    """Holds the plan for a job, and what it is predicted to cost; as text, it is explained for people."""

    plan: Plan
    devices: tuple[str, ...]  # the name of each rank's device
    seconds: float | None  # of a step; None for a plan that splits channels, whose time cannot be predicted
    samples_per_second: float | None
    memory: tuple[float, ...]  # bytes that each rank needs besides what its process takes; empty without a prediction
    text: str

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan to a file for `horizonml train JOB --plan FILE`, and return its path. Raises HorizonError."""
        write_plan(self.plan, Path(path), self.devices)
        return Path(path)

    def __repr__(self) -> str:  # which notebooks show
        return self.text


@in_this_process()
def plan(
    job: JobLike = None,
    *,
    devices: str | os.PathLike[str] | None = None,
    model: ModelLike = None,
    data: DataLike = None,
    task: TaskLike = None,
    workers: int | None = None,
    **fields: Any,
) -> PlannedJob:
    """Return the plan for a job: which rank computes which layers on which part of every batch.

    The model's layers are measured in this process, once for a model and a machine. No rank is started.

    Parameters:
        job: The job, as for `train`.
        devices: A file that describes devices and links, to plan for them instead of for this machine.
        model: The model, as for `train`.
        data: The data, as for `train`.
        task: The task, as for `train`.
        workers: The number of ranks; with `devices` it is the number of devices.
        **fields: Further fields of the job, such as `parallel={"strategy": "pipeline"}`.

    Raises HorizonError, also for a plan that does not fit the devices' memory.
    """
    made, given = make_job(job, model, data, task, workers, fields)
    given.install()
    planned = plan_job(made, Path(devices) if devices is not None else None, False, partial(print, file=sys.stderr))
    found, size = planned.found, planned.job.batch_size
    seconds = found.prediction.seconds if planned.predicted else None
    memory = found.prediction.memory if planned.predicted else {}
    return PlannedJob(
        found.plan,
        tuple(planned.places.names),
        seconds,
        size / seconds if seconds is not None else None,
        tuple(memory[rank] for rank in sorted(memory)),
        _text(planned),
    )


def _text(planned: Planned) -> str:
    """Return a plan with its reasons for people."""
    problem, found, names = planned.problem, planned.found, planned.places.names
    lines = [found.plan.describe(planned.model.chain.names)]
    if not planned.predicted:
        return "\n".join([*lines, "no prediction: the profile does not say what is sent within layers"])
    seconds, size = found.prediction.seconds, planned.job.batch_size
    lines += [
        f"predicted: {human_seconds(seconds)} a step of {count(size, 'sample')} ({size / seconds:,.0f} samples/s)",
        *([f"  {parts}"] if (parts := explain_parts(found)) else []),
        *(reason.text for reason in planned.reasons(Told.PLAN)),
    ]
    if 1 < problem.ranks <= _MOST_EXPLAINED:
        lines.append(compare(problem, found, names).text)
    return "\n".join(lines)
