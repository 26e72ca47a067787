"""Reads a checkpoint back as the whole model that it was made of: an ordinary module with the trained values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from horizonml.data.choose import describe
from horizonml.data.dataset import DataInfo
from horizonml.errors import CheckpointError
from horizonml.job.schema import Job
from horizonml.models.zoo import construct
from horizonml.state.shards import Metadata, find, opened
from horizonml.tasks.choose import channels_for, task_for
from horizonml.tasks.task import Task


@dataclass(frozen=True)
class Trained:
    """Holds a trained model with all that is needed to use it."""

    path: Path  # of the checkpoint
    metadata: Metadata
    job: Job
    info: DataInfo  # of the data that it was trained on
    task: Task
    model: nn.Module  # in evaluation mode


def read_whole(source: Path, job: Job | None = None) -> Trained:
    """Return the model of the newest intact checkpoint at `source`, a checkpoint or a run's folder.

    `job` takes the place of the checkpoint's own. The code that it names is imported and run. Raises CheckpointError,
    or what is wrong with the model or the data.
    """
    path, metadata = find(source)
    job = job or job_of(path, metadata)
    info = info_of(path, metadata) or _described(path, job)
    task = task_for(job, info)
    model = construct(job.model, job.seed, task.outputs(info), task.input(info))
    with opened(path, metadata.shards) as (names, read):
        _fill(model, {name.removeprefix("model/"): read(name) for name in names if name.startswith("model/")}, path)
    return Trained(path, metadata, job, info, task, model.eval())


def job_of(path: Path, metadata: Metadata) -> Job:
    """Return the job that a checkpoint belongs to. Raises CheckpointError."""
    try:
        return Job.model_validate(metadata.job)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{path}: this version cannot use the checkpoint's job: {field}: {first['msg']}"
        ) from None


def info_of(path: Path, metadata: Metadata) -> DataInfo | None:
    """Return the description of the data that a checkpoint was made with; older ones do not have it.

    Raises CheckpointError.
    """
    if not metadata.data:
        return None
    try:
        return DataInfo.from_json(metadata.data)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its description of the data cannot be read: {error}") from None


def _described(path: Path, job: Job) -> DataInfo:
    """Return the description of a job's data, made from the data itself. Raises CheckpointError."""
    info = describe(job.data, channels_for(job))
    if info is None:
        raise CheckpointError(
            f"{path} does not describe the data that it was trained on, and {job.data.folder} is not a folder here"
        )
    return info


def _fill(model: nn.Module, values: dict[str, Tensor], path: Path) -> None:
    """Give a model the values of a checkpoint.

    What has no part in the forward pass is in no checkpoint, and stays as it was built. Raises CheckpointError.
    """
    own: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    own |= dict(model.named_buffers(remove_duplicate=False))
    for name, value in values.items():
        if name not in own:
            raise CheckpointError(
                f"{path} has values for {name}, which the model does not have: its code, or model.options, has changed"
            )
        if own[name].shape != value.shape:
            raise CheckpointError(
                f"{path} has {name} with shape {list(value.shape)}, but the model's has {list(own[name].shape)}: its "
                "code, or model.options, has changed"
            )
        with torch.no_grad():
            own[name].copy_(value)
