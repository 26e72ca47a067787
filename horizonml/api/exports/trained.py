"""Builds the model of a checkpoint as an ordinary module with the trained weights.

The weights are never held in memory twice: tensors are views of the shards' files. A checkpoint that lacks a tensor
with which its model computes is refused, so that no initial value is exported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from horizonml.data.choose import describe
from horizonml.data.dataset import DataInfo
from horizonml.errors import CheckpointError, DataError, JobError, MissingPackage, ModelError
from horizonml.job.jobfile import code_fields, from_values
from horizonml.job.schema import Job
from horizonml.models.weights import aliases
from horizonml.models.zoo import build, construct
from horizonml.state.optim import AVERAGE, sources
from horizonml.state.shards import Metadata, find, opened
from horizonml.tasks.choose import channels_for, task_for
from horizonml.tasks.task import InputSpec, Task
from horizonml.text import some

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
    return from_values(job.model_dump(), job.name, overrides) if overrides else job


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


def refuse_incomplete(path: Path, job: Job, info: DataInfo, names: Iterable[str]) -> None:
    """Raise CheckpointError if a checkpoint with tensors of these names lacks any that the model's forward pass uses.

    What has no part in the forward pass is in no checkpoint of older versions. The model is built without memory for
    its parameters.
    """
    task = task_for(job, info)
    # Pretrained weights are where the training began, and need not be on this machine.
    spec = job.model.model_copy(update={"weights": None})
    chain = build(spec, job.seed, task.outputs(info), task.input(info)).chain
    used = [name for layer in range(len(chain)) for name in chain.slice(layer, layer + 1).state_dict()]
    missing = sorted({*used} - {*names} - {*chain.spare})
    if missing:
        raise CheckpointError(
            f"{path} has no values for {some(missing)}, which {job.model.name} computes with; it is incomplete, or the "
            "model has changed since. Take another checkpoint: nothing is exported with initial values"
        )


def refuse_incomplete_data(path: Path, job: Job | None, info: DataInfo | None, names: Iterable[str]) -> None:
    """Do the same as far as it can be told without running code that the checkpoint's job names."""
    if job is None or info is None or code_fields(job):
        _log.info("%s is not compared with its model, whose code is not run for this", path)
        return
    try:
        refuse_incomplete(path, job, info, names)
    except (DataError, JobError, MissingPackage, ModelError) as error:
        _log.warning("%s cannot be compared with its model, to see whether a tensor is missing: %s", path, error)


def mapped_weights(path: Path, metadata: Metadata, average: bool | None = None) -> tuple[dict[str, Tensor], bool]:
    """Return a checkpoint's parameters and buffers by their names in the original model, and whether they are averages.

    With `average`, parameters that have a moving average are taken from it; without a choice, they are if the run's own
    evaluations did so (`ema.evaluate`), and the weights are those that the recorded metrics belong to. The shards are
    mapped: a tensor is read from disk when it is used, and the system can take its memory back. Raises CheckpointError.
    """
    with opened(path, metadata.shards) as (names, read):
        found = sources(names, _evaluated(metadata) if average is None else average)
        # What the optimizer keeps of a parameter is there only if the parameter is.
        entries = (
            name.removeprefix("optimizer/").rpartition("/")[0] for name in names if name.startswith("optimizer/")
        )
        if lost := sorted({*entries} - {*found}):
            raise CheckpointError(f"{path} has no values for {some(lost)}, whose optimizer state it has")
        weights = {name: read(source) for name, source in found.items()}
    if not weights:
        raise CheckpointError(f"{path} has no parameters")
    averaged = any(source == f"optimizer/{name}/{AVERAGE}" for name, source in found.items())
    if average and not averaged:
        raise CheckpointError(f"{path} has no averages of the parameters: train with ema.decay, for example 0.999")
    return weights, averaged


def _evaluated(metadata: Metadata) -> bool:
    """Tell whether the run evaluated the averages of its parameters, as far as its checkpoint says."""
    ema = (metadata.job or {}).get("ema") or {}
    return bool(ema.get("decay")) and bool(ema.get("evaluate", True))
