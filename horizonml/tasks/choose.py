"""Chooses the task that a job names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from horizonml.data.dataset import DataInfo
from horizonml.errors import JobError
from horizonml.job.schema import Job
from horizonml.machine.code import find
from horizonml.models.spec import TORCHVISION_MODELS
from horizonml.tasks.classification import Classification, MultiLabel
from horizonml.tasks.language_model import LanguageModel
from horizonml.tasks.regression import Regression
from horizonml.tasks.segmentation import Segmentation
from horizonml.tasks.task import Task, check_class, check_made


def task_for(job: Job, info: DataInfo) -> Task:
    """Return the task of a job, for data of this kind. Raises JobError or DataError."""
    name, options = job.task.name, dict(job.task.options)
    if name == "auto":
        name = info.task
    if job.label_smoothing and name == "classification":
        options.setdefault("label_smoothing", job.label_smoothing)
    build: dict[str, Callable[..., Task]] = {
        "classification": Classification,
        "multi_label": MultiLabel,
        "regression": Regression,
        "segmentation": lambda **given: Segmentation.of(info, **given),
        "language_model": lambda **given: LanguageModel.of(info, **given),
    }
    constructor = build.get(name) or _own(name)
    try:
        task = constructor(**options)
    except TypeError as error:
        raise JobError(f"task.options: {name} cannot be made with {options}: {error}") from error
    check_made(task, name)
    return task


def channels_for(job: Job) -> int | None:
    """Return the number of colour channels that a job's model expects, or None to use those of the data."""
    return 3 if job.model.name in TORCHVISION_MODELS else None


def _own(name: str) -> Callable[..., Task]:
    """Return the user's own task. Raises JobError if it lacks what a task needs."""
    found: Any = find(name, "task.name", JobError)
    check_class(found, name)
    return cast(Callable[..., Task], found)
