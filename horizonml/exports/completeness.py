"""Tells whether a checkpoint has all tensors that its model computes with, so that no initial value is exported."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from horizonml.data.dataset import DataInfo
from horizonml.errors import CheckpointError, DataError, JobError, MissingPackage, ModelError
from horizonml.job.foreign import code_fields
from horizonml.job.schema import Job
from horizonml.models.zoo import build
from horizonml.tasks.choose import task_for
from horizonml.text import some

_log = logging.getLogger(__name__)


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
