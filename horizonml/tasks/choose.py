"""Chooses the task that a job names."""

from __future__ import annotations

from functools import partial
from typing import Any

from horizonml.data.dataset import DataInfo
from horizonml.errors import JobError
from horizonml.job.schema import Job
from horizonml.machine.code import find
from horizonml.models.spec import TORCHVISION_MODELS
from horizonml.tasks.spec import TASKS
from horizonml.tasks.task import Task, check_class, check_made


def task_for(job: Job, info: DataInfo) -> Task:
    """Return the task of a job, for data of this kind. Raises JobError or DataError."""
    name, options = job.task.name, dict(job.task.options)
    if name == "auto":
        name = info.task
    if job.label_smoothing and name == "classification":
        options.setdefault("label_smoothing", job.label_smoothing)
    constructor: Any = find(TASKS.get(name, name), "task.name", JobError)
    check_class(constructor, name)
    if name in TASKS and hasattr(constructor, "of"):
        constructor = partial(constructor.of, info)
    try:
        task: Task = constructor(**options)
    except TypeError as error:
        raise JobError(f"task.options: {name} cannot be made with {options}: {error}") from error
    check_made(task, name)
    return task


def channels_for(job: Job) -> int | None:
    """Return the number of colour channels that a job's model expects, or None to use those of the data."""
    return 3 if job.model.name in TORCHVISION_MODELS else None
