"""Writes plans to files, and reads them back into a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from horizonml.errors import JobError
from horizonml.files import write_atomically, writing
from horizonml.job.jobfile import changed
from horizonml.job.schema import Job
from horizonml.plan.plan import Plan, Sync
from horizonml.spec.reading import read_yaml


def plan_values(plan: Plan) -> dict[str, object]:
    """Return a plan as a job's `parallel` section has it."""
    stages = [
        {
            "ranks": list(stage.ranks),
            "shares": list(stage.shares),
            "send": stage.send,
            "layers": [stage.start, stage.stop - 1],
            **({} if stage.sync is Sync.ALL_REDUCE else {"sync": stage.sync.value}),
        }
        for stage in plan.stages
    ]
    return {"schedule": plan.schedule, "micro_batches": plan.micro_batches, "stages": stages}


def write_plan(plan: Plan, path: Path, names: Sequence[str] = ()) -> None:
    """Write a plan as YAML for `horizonml train --plan`; `names` are those of the ranks' devices. Raises JobError."""
    lines = ["# A plan, made by `horizonml plan`: horizonml train JOB --plan THIS"]
    lines += [f"# rank {rank}: {name}" for rank, name in enumerate(names)]
    content = yaml.safe_dump(plan_values(plan), sort_keys=False, default_flow_style=None, width=120)
    text = "\n".join([*lines, content])
    with writing(path):
        write_atomically(path, text.encode())


def read_plan(job: Job, path: Path) -> Job:
    """Return the job with the plan of a file. Raises JobError."""
    values = read_yaml(path, f"`horizonml plan JOB --out {path}` writes one")
    if isinstance(values, dict) and set(values) == {"schedule", "micro_batches", "stages"}:
        values = {**values, "workers": None}
    elif isinstance(values, dict) and set(values) == {"strategy", "workers"}:  # Horovod's, by version 0.1
        values = {**values, "micro_batches": None, "stages": None}
    else:
        raise JobError(f"{path}: not a plan; `horizonml plan JOB --out {path}` writes one")
    return changed(
        job, {f"parallel.{key}": value for key, value in values.items()}, f"{job.name} by the plan of {path}"
    )
