"""Reads job files and plan files: from YAML to a checked `Job`, with errors that the user can act on.

Everything that can be checked without PyTorch, a socket or the data is checked here. Unknown keys are refused,
and every error names the field, the value and a way out. Plans are written to files in the same form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from horizonml.errors import JobError
from horizonml.files import write_atomically, writing
from horizonml.job.schema import Job
from horizonml.plan.plan import Plan, Sync
from horizonml.spec.base import explain
from horizonml.spec.reading import parse_yaml, read_text, read_yaml
from horizonml.text import nearest


def load(path: Path, overrides: Iterable[str] = ()) -> Job:
    """Read a job file, or a ready job by its name, and apply overrides like `section.key=value`. Raises JobError."""
    ready = ready_jobs()
    file = ready.get(str(path), path) if not path.is_file() else path
    hint = f"give the path of a job file, or the name of a ready one ({', '.join(ready)}){nearest(path.stem, ready)}"
    return parse(read_text(file, hint), str(path), overrides)


def ready_jobs() -> dict[str, Path]:
    """Return the job files that come with the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parents[1] / "jobs").glob("*.yaml"))}


def parse(text: str, source: str, overrides: Iterable[str] = ()) -> Job:
    """Return the job of a job file's text, as `load` does; `source` names it in errors. Raises JobError."""
    values = parse_yaml(text, source)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise JobError(f"{source}: a job file is a mapping of keys to values, not a {type(values).__name__}")
    for override in overrides:
        _apply(values, override)
    return _checked(values, source)


def from_values(values: Mapping[str, object], source: str, overrides: Iterable[str] = ()) -> Job:
    """Return the job with the fields of a mapping and overrides, as `load` does. Raises JobError."""
    changed_values = dict(values)
    for override in overrides:
        _apply(changed_values, override)
    return _checked(changed_values, source)


def changed(job: Job, changes: Mapping[str, Any], source: str | None = None) -> Job:
    """Return the job with some fields changed, named as `section.field`, and checked again.

    Raises JobError, which names the `source`: by default the job and the changes.
    """
    values = job.model_dump()
    for key, value in changes.items():
        *sections, last = key.split(".")
        target = values
        for section in sections:
            target = target[section]
        target[last] = value
    return _checked(
        values, source or f"{job.name} with {', '.join(f'{key}={value}' for key, value in changes.items())}"
    )


def overridden(job: Job, overrides: Iterable[str]) -> Job:
    """Return the job with overrides like `section.key=value` applied, as `load` does. Raises JobError."""
    values: dict[str, object] = job.model_dump()
    for override in overrides:
        _apply(values, override)
    return _checked(values, job.name)


def _checked(values: Mapping[str, object], source: str) -> Job:
    """Return the job with these values. Raises JobError, which names every mistake."""
    try:
        return Job.model_validate(values)
    except ValidationError as error:
        raise JobError(f"{source} is not a valid job:\n{explain(error, Job)}") from None


def json_schema() -> dict[str, object]:
    """Return the job file's JSON schema, for editors."""
    schema = Job.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "HorizonML job", **schema}


def _apply(values: dict[str, object], override: str) -> None:
    """Change the values of a job file as an override `section.key=value` says. Raises JobError."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise JobError(f"--set {override}: write it as section.key=value")
    *sections, last = key.split(".")
    target = values
    for section in sections:
        inner = target.setdefault(section, {})
        if not isinstance(inner, dict):
            raise JobError(f"--set {override}: {section} is {inner!r}, which has no keys")
        target = inner
    target[last] = parse_yaml(text, f"--set {override}")


def plan_values(plan: Plan) -> dict[str, object]:
    """Return a plan as a job's `parallel` section has it."""
    stages = [
        {
            "ranks": list(stage.ranks),
            "shares": list(stage.shares),
            "send": stage.send,
            "layers": [stage.start, stage.stop - 1],
            **({} if stage.sync is Sync.ALL_REDUCE or stage.sync.steps_alone else {"sync": stage.sync.name}),
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
