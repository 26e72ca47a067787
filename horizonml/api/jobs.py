"""Makes a job from what the functions of the Python API are given: a file, a mapping, a job, objects, single fields."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horizonml.api.given import Given
from horizonml.data.spec import SOURCES
from horizonml.errors import JobError
from horizonml.job.jobfile import from_values, load
from horizonml.job.schema import Job
from horizonml.text import nearest

if TYPE_CHECKING:
    from torch import nn

    from horizonml.tasks.task import Task

    ModelLike = type[nn.Module] | Callable[..., nn.Module] | nn.Module | Mapping[str, Any] | str | None
    TaskLike = type[Task] | Task | Mapping[str, Any] | str | None
else:  # these would load PyTorch
    ModelLike = TaskLike = Any

JobLike = Job | Mapping[str, Any] | str | os.PathLike[str] | None
"""The path of a job file, the name of a ready job, a mapping of a job's fields, or a `Job`; None for the defaults."""

DataLike = Any
"""A map-style `Dataset`, tensors or arrays (inputs, targets), a pair of either (train, held out), a function that
returns one of these, a name, a folder of images, or the fields of the job's section."""


def make_job(
    job: JobLike,
    model: ModelLike = None,
    data: DataLike = None,
    task: TaskLike = None,
    workers: int | None = None,
    fields: Mapping[str, Any] | None = None,
) -> tuple[Job, Given]:
    """Return a job with the given parts and fields, and the objects that it names.

    Where the job says nothing else, the planner decides what several workers share. Raises JobError.
    """
    values, source = _values(job)
    given = Given()
    for section, thing in (("model", model), ("data", data), ("task", task)):
        if thing is not None:
            values = merged(values, {section: _section(section, thing, given)})
    values = merged(values, fields or {})
    if workers is not None:
        values = merged(values, {"parallel": {"workers": workers}})
        if isinstance(workers, int) and workers > 1 and not {"strategy", "stages"} & values["parallel"].keys():
            values["parallel"]["strategy"] = "auto"
    return from_values(values, source), given


def _values(job: JobLike) -> tuple[dict[str, Any], str]:
    """Return the fields that a job sets, and what errors call it."""
    if job is None:
        return {}, "the job"
    if isinstance(job, Job):
        return job.model_dump(exclude_unset=True), f"the job {job.name}"
    if isinstance(job, Mapping):
        return dict(job), "the job"
    if isinstance(job, str | os.PathLike):
        return load(Path(job)).model_dump(exclude_unset=True), os.fspath(job)
    raise JobError(f"job: give the path of a job file, a ready job's name, a mapping or a Job, not {job!r}")


def _section(section: str, thing: Any, given: Given) -> Mapping[str, Any]:
    """Return the fields of a job's section for what was given for it."""
    if isinstance(thing, Mapping) and not (section == "data" and set(thing) == {"inputs", "targets"}):
        return thing
    if section == "data" and isinstance(thing, str | os.PathLike):
        return data_section(os.fspath(thing))
    if isinstance(thing, str):
        return {"name": thing}
    return {"name": given.add(section, thing)}


def data_section(text: str) -> dict[str, Any]:
    """Return the fields for data that are named by a single text: a data set's name, or a folder of images.

    Raises JobError for what is neither.
    """
    if text in SOURCES or ":" in text:
        return {"name": text}
    if Path(text).is_dir():
        return {"name": "folder", "folder": text}
    if Path(text).exists():
        raise JobError(
            f"data: {text} is a file, and a folder of images is expected; for other files, give the fields of a job's "
            f"section, such as {{name: table, path: {text}, inputs: [...], targets: [...]}} or {{name: text, path: "
            f"{text}}}"
        )
    raise JobError(
        f"data: {text!r} is no folder that is here, and none of {', '.join(SOURCES)}, or module:callable"
        f"{nearest(text, SOURCES)}"
    )


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with changes; a section is changed field by field, or replaced if its name changes."""
    result = dict(values)
    for key, change in changes.items():
        before = result.get(key)
        before = {"name": before} if isinstance(before, str) and isinstance(change, Mapping) else before
        if isinstance(change, Mapping) and isinstance(before, Mapping):
            renamed = "name" in change and before.get("name", change["name"]) != change["name"]
            result[key] = dict(change) if renamed else merged(before, change)
        else:
            result[key] = change
    return result
