"""Writes plans to files, and reads them back into a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
            **({} if stage.sync in (Sync.ALL_REDUCE, Sync.LOCAL) else {"sync": stage.sync.value}),
        }
        for stage in plan.stages
    ]
    local = {"sync": plan.local.to_json()} if plan.local is not None else {}
    return {"schedule": plan.schedule, "micro_batches": plan.micro_batches, "stages": stages, **local}


def write_plan(plan: Plan, path: Path, names: Sequence[str] = ()) -> None:
    """Write a plan as YAML for `horizonml train --plan`; `names` are those of the ranks' devices. Raises JobError.

    Ranks that the plan leaves out are not in the file, and the others are numbered anew.
    """
    if plan.spare:
        kept = [rank for rank in range(plan.world_size) if rank not in plan.spare]
        place = {rank: number for number, rank in enumerate(kept)}
        stages = tuple(replace(stage, ranks=tuple(place[rank] for rank in stage.ranks)) for stage in plan.stages)
        plan, names = replace(plan, stages=stages, spare=()), [names[rank] for rank in kept] if names else ()
    lines = ["# A plan, made by `horizonml plan`: horizonml train JOB --plan THIS"]
    devices = {"devices": list(names)} if names else {}  # of ranks 0, 1, ...
    content = yaml.safe_dump({**devices, **plan_values(plan)}, sort_keys=False, default_flow_style=None, width=120)
    text = "\n".join([*lines, content])
    with writing(path):
        write_atomically(path, text.encode())


def read_plan(job: Job, path: Path) -> Job:
    """Return the job with the plan of a file. Raises JobError."""
    values = _read(path)
    if isinstance(values, dict):
        values.pop("devices", None)
    if isinstance(values, dict) and set(values) - {"sync"} == {"schedule", "micro_batches", "stages"}:
        values = {"sync": None, **values, "workers": None, "replicas": None}
    elif isinstance(values, dict) and set(values) == {"strategy", "workers"}:  # Horovod's, by version 0.1
        values = {**values, "micro_batches": None, "stages": None}
    else:
        raise JobError(f"{path}: not a plan; `horizonml plan JOB --out {path}` writes one")
    return changed(
        job, {f"parallel.{key}": value for key, value in values.items()}, f"{job.name} by the plan of {path}"
    )


def read_devices(path: Path) -> list[str]:
    """Return the names of the ranks' devices in a plan's file, or nothing if it has none. Raises JobError."""
    values = _read(path)
    names = values.get("devices", []) if isinstance(values, dict) else []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise JobError(f"{path}: devices: not a list of names; `horizonml plan JOB --out {path}` writes one")
    return names


def _read(path: Path) -> Any:
    return read_yaml(path, f"`horizonml plan JOB --out {path}` writes one")
