"""Builds the model of a checkpoint as an ordinary module with the trained weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from horizonml.data.choose import describe
from horizonml.data.dataset import DataInfo
from horizonml.errors import CheckpointError, DataError
from horizonml.exports.completeness import refuse_incomplete
from horizonml.exports.weights import mapped_weights
from horizonml.job.jobfile import overridden
from horizonml.job.schema import Job
from horizonml.models.weights import aliases
from horizonml.models.zoo import construct
from horizonml.state.shards import Metadata, find
from horizonml.tasks.choose import channels_for, task_for
from horizonml.tasks.task import InputSpec, Task

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """Holds a trained model, and what it was trained for."""

    module: nn.Module  # in eval mode
    job: Job
    info: DataInfo
    task: Task
    input: InputSpec
    path: Path  # of the checkpoint
    metadata: Metadata
    averaged: bool = False  # whether the parameters are their moving averages

    def arguments(self, inputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return the positional and the named arguments of the module for these inputs."""
        if self.input.names:
            return (), dict(zip(self.input.names, inputs, strict=True))
        return tuple(inputs), {}

    @property
    def input_names(self) -> list[str]:
        """Return a name for each input."""
        return list(self.input.names) or ["input"]

    def outputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return all tensors of the model's output, in the order in which PyTorch flattens it."""
        args, kwargs = self.arguments(inputs)
        with torch.no_grad():
            return flat_tensors(self.module(*args, **kwargs))


def flat_tensors(output: Any) -> list[Tensor]:
    """Return the tensors of any nesting, in order."""
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]


def load_trained(
    source: Path, overrides: Sequence[str] = (), job: Job | None = None, average: bool | None = None
) -> Trained:
    """Return the model of a checkpoint, or of the newest intact one of a run's folder, in memory and in eval mode.

    The model is built by the code that the checkpoint's job names, as in training; `overrides` change fields of that
    job, such as `data.folder=/mnt/data`, and `job` takes its place. With `average`, the parameters are their moving
    averages; without a choice, they are if the run evaluated those. Raises HorizonError.
    """
    path, metadata = find(source)
    job = job or job_of(path, metadata, overrides)
    info = info_of(path, metadata, job)
    task = task_for(job, info)
    input = task.input(info)
    module = construct(job.model, job.seed, task.outputs(info), input)
    try:
        # What has no part in the forward pass is in no checkpoint of older versions, and stays as it was built.
        weights, averaged = mapped_weights(path, metadata, average)
        for other, name in aliases(module).items():
            if name in weights:
                weights[other] = weights[name]
        missing, unexpected = module.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise CheckpointError(_unfit(path, job, " ".join(str(error).split())[:300])) from error
    if unexpected:
        raise CheckpointError(_unfit(path, job, f"the model has no {unexpected[0]}"))
    if missing:
        refuse_incomplete(path, job, info, weights)
        _log.warning("%s has no values for %s, which stay as they were built", path, ", ".join(missing))
    return Trained(module.eval(), job, info, task, input, path, metadata, averaged)


def _unfit(path: Path, job: Job, problem: str) -> str:
    return f"{path}: its weights do not fit {job.model.name}, which may have changed since: {problem}"


def job_of(path: Path, metadata: Metadata, overrides: Sequence[str] = ()) -> Job:
    """Return the job that a checkpoint belongs to, with `overrides`. Raises CheckpointError or JobError."""
    if not metadata.job:
        raise CheckpointError(f"{path} does not say which job it belongs to")
    try:
        job = Job.model_validate(metadata.job)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path}: its job cannot be read by this version: {where}: {first['msg']}") from error
    return overridden(job, overrides) if overrides else job


def info_of(path: Path, metadata: Metadata, job: Job) -> DataInfo:
    """Return the description of the data that a checkpoint was trained on. Raises CheckpointError or DataError.

    It is in the checkpoint; for one of an older version, it is made from the data itself.
    """
    saved = (metadata.model_extra or {}).get("data")
    if saved is not None:
        try:
            return DataInfo.from_json(saved)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: its description of the data cannot be read: {error}") from error
    info = describe(job.data, channels_for(job))
    if info is None:
        raise DataError(f"data.folder: {job.data.folder} is not on this machine, and {path} does not describe the data")
    return info
