"""Implements `horizonml.load`, `evaluate`, `predict` and `export`: the uses of a trained model, in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from horizonml.api.exports.trained import Trained, info_of, job_of, load_trained
from horizonml.api.given import in_this_process
from horizonml.api.history import Run
from horizonml.api.jobs import DataLike, ModelLike, TaskLike, data_section, make_job
from horizonml.data.choose import describe
from horizonml.data.choose import load as load_data
from horizonml.data.dataset import DataBatch, DataInfo, Inputs, Tree
from horizonml.data.own import is_array
from horizonml.data.samples import join, tensor_of
from horizonml.data.spec import SOURCES, DataSpec
from horizonml.errors import DataError, JobError, ModelError
from horizonml.files import cache_folder
from horizonml.job.jobfile import from_values
from horizonml.job.schema import Job
from horizonml.state.shards import find
from horizonml.tasks.choose import channels_for

Parts = Literal["held-out", "train", "all"]
CheckpointLike = Run | str | os.PathLike[str]
"""A trained model: a run, the folder of a run (its newest intact checkpoint), or the folder of a checkpoint."""


@dataclass(frozen=True)
class Result:
    """Holds the result of an evaluation."""

    loss: float
    metrics: dict[str, float]
    samples: int


@in_this_process()
def load(checkpoint: CheckpointLike, *, model: ModelLike = None) -> nn.Module:
    """Return the trained model as an ordinary module in evaluation mode.

    A model that was given to `train` as an object is needed again as `model`, unless `checkpoint` is the run itself.
    Code that the checkpoint's job names as `module:callable` is imported and run. Raises HorizonError.
    """
    return trained(checkpoint, model).module


@in_this_process()
def evaluate(
    checkpoint: CheckpointLike,
    data: DataLike = None,
    *,
    part: Parts | None = None,
    model: ModelLike = None,
    task: TaskLike = None,
    batch_size: int = 256,
) -> dict[str, float]:
    """Return the loss and the metrics of a trained model.

    Parameters:
        checkpoint: A run, the folder of a run, or the folder of a checkpoint.
        data: What to evaluate on, as for `train`; by default the data that the model was trained on.
        part: "held-out", "train" or "all" samples; by default the held-out samples of the data that the model was
            trained on, and all samples of other data.
        model: The model, if it was given to `train` as an object and `checkpoint` is a folder.
        task: The task, likewise.
        batch_size: Samples that are evaluated at a time.

    Raises HorizonError.
    """
    _check_size(batch_size)
    found = trained(checkpoint, model, task)
    result = evaluated(
        found if data is None else with_data(found, data), parse_part(part, data is not None), batch_size
    )
    return {"loss": result.loss, **result.metrics}


@in_this_process()
def predict(
    checkpoint: CheckpointLike,
    inputs: DataLike,
    *,
    part: Parts = "all",
    model: ModelLike = None,
    batch_size: int = 256,
) -> Tree:
    """Return the outputs of a trained model, such as the logits of classes, with a row for each sample.

    Parameters:
        checkpoint: A run, the folder of a run, or the folder of a checkpoint.
        inputs: A tensor or an array `[samples, ...]`, a tuple of them for a model with several inputs, or data as for
            `train`.
        part: "held-out", "train" or "all" samples of data.
        model: The model, if it was given to `train` as an object and `checkpoint` is a folder.
        batch_size: Samples that are computed at a time.

    Raises HorizonError.
    """
    _check_size(batch_size)
    found = trained(checkpoint, model)
    if is_array(inputs) or (isinstance(inputs, tuple) and inputs and all(map(is_array, inputs))):
        tensors = _inputs_for(found, inputs if isinstance(inputs, tuple) else (inputs,))
        batches: Iterator[Inputs] = (
            rows if len(rows) > 1 else rows[0] for rows in zip(*(one.split(batch_size) for one in tensors), strict=True)
        )
    else:
        opened = batches_of(with_data(found, inputs), part, batch_size)
        batches = (batch.inputs(0, batch.size) for batch in opened)
    outputs = [outputs_of(found, rows) for rows in batches]
    if not outputs:
        raise DataError("data: there are no samples to predict")
    return join(outputs)


def _check_size(batch_size: int) -> None:
    """Raise JobError for a number of samples that is no number of samples."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise JobError(f"batch_size: {batch_size!r} is not a number of samples of at least 1")


def _inputs_for(found: Trained, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Return a model's inputs as tensors. Raises DataError if they are not those that it was trained on."""
    tensors, known = [tensor_of(one, "inputs") for one in inputs], found.info.inputs
    dimensions = [one.dim() for one in tensors] == [len(spec.shape) + 1 for spec in known]
    if not dimensions or len({len(one) for one in tensors}) > 1:
        given = " and ".join(str(list(one.shape)) for one in tensors)
        taken = " and ".join(f"[{', '.join(map(str, ('samples', *spec.shape)))}]" for spec in known)
        raise DataError(f"inputs: {given} is their shape, but the model takes {taken}")
    return tensors


@in_this_process()
def export(
    checkpoint: CheckpointLike,
    output: str | os.PathLike[str],
    format: str = "auto",
    samples: int = 16,
    *,
    model: ModelLike = None,
    average: bool | None = None,
) -> Path:
    """Write a trained model to a file for other programs, with a model card beside it, and return the file's path.

    Parameters:
        checkpoint: A run, the folder of a run, or the folder of a checkpoint.
        output: The file to write: model.pt (a state dict), model.safetensors, model.onnx, or model.pt2 (torch.export).
        format: "state-dict", "safetensors", "onnx" or "torch-export"; "auto" goes by the file's ending.
        samples: Number of held-out samples on which the file is compared with the model before it is kept; 0 for none.
        model: The model, if it was given to `train` as an object and `checkpoint` is a folder.
        average: Whether to export the moving averages of the parameters; by default if the run evaluated those.

    Raises HorizonError.
    """
    from horizonml.api.exports.export import export as write

    folder, job = _place(checkpoint, model)
    overrides = [f"model.name={job.model.name}"] if job is not None else []
    return write(folder, Path(output), format, samples, overrides=overrides, average=average).output


def trained(checkpoint: CheckpointLike, model: ModelLike = None, task: TaskLike = None) -> Trained:
    """Return a trained model with all that is needed to use it. Raises HorizonError."""
    folder, job = _place(checkpoint, model, task)
    return load_trained(folder, job=job)


def _place(checkpoint: CheckpointLike, model: ModelLike = None, task: TaskLike = None) -> tuple[Path, Job | None]:
    """Return the folder of a trained model, and its job if that names objects of this process. Raises HorizonError."""
    folder = checkpoint.folder if isinstance(checkpoint, Run) else Path(checkpoint)
    known = checkpoint.installed() if isinstance(checkpoint, Run) else None
    if model is None and task is None:
        return folder, known
    job, given = make_job(known or job_of(*find(folder)), model, None, task)
    given.install()
    return folder, job


def trained_with(checkpoint: Path, data: str | None, overrides: Sequence[str]) -> Trained:
    """Return a trained model whose job has other data, named by a text, and overrides. Raises HorizonError."""
    path, metadata = find(checkpoint)
    job = job_of(path, metadata)
    values = job.model_dump()
    if data is not None:
        values["data"] = _elsewhere(job, data) or _like_before(data_section(data), info_of(path, metadata, job))
    return load_trained(path, job=from_values(values, f"the job of {path}", overrides))


def with_data(found: Trained, data: DataLike) -> Trained:
    """Return a trained model whose job has other data. Raises HorizonError."""
    values = found.job.model_dump()
    elsewhere = _elsewhere(found.job, data) if isinstance(data, str | os.PathLike) else None
    if elsewhere is None:
        job, given = make_job(found.job.model_copy(update={"data": DataSpec()}), data=data)
        given.install()
        elsewhere = _like_before(job.data.model_dump(exclude_unset=True), found.info)
    return replace(found, job=from_values({**values, "data": elsewhere}, f"the job of {found.path}"))


def _elsewhere(job: Job, place: str | os.PathLike[str]) -> dict[str, object] | None:
    """Return the fields of a job's data with the path of other content of the same form, if `place` is one."""
    if job.data.source.place != "path" or not Path(place).exists():
        return None
    return {**job.data.model_dump(), "path": os.fspath(place), "samples": None}


def _like_before(section: dict[str, object], info: DataInfo) -> dict[str, object]:
    """Return the fields of data so that images have the size that the model was trained on."""
    if section["name"] not in SOURCES or SOURCES[section["name"]].kind != "images" or len(info.inputs[0].shape) != 3:
        return section
    channels, _, width = info.inputs[0].shape
    return {"image_size": width, "channels": channels, **section}


def parse_part(text: str | None, other: bool) -> Parts:
    """Return the part of the data that is meant; `other` data than the training's is taken as a whole by default.

    Raises JobError.
    """
    match text:
        case None:
            return "all" if other else "held-out"
        case "held-out" | "train" | "all":
            return text
    raise JobError(f"part: {text!r} is not one of held-out, train and all")


def evaluated(found: Trained, part: Parts, batch_size: int) -> Result:
    """Return the loss and the metrics of a model on a part of its job's data. Raises HorizonError."""
    task, loss, units, samples = found.task, 0.0, 0, 0
    sums = torch.zeros(len(task.metrics), dtype=torch.float64)
    for batch in batches_of(found, part, batch_size):
        rows = batch.rows(0, batch.size, True, True)
        assert rows.inputs is not None
        assert rows.targets is not None
        outputs, targets = outputs_of(found, rows.inputs), rows.targets
        with torch.no_grad():
            loss += float(task.loss(outputs, targets, False))
            sums += task.judge(outputs, targets)
        units, samples = units + task.units(targets), samples + batch.size
    if not units:
        raise DataError("data: there are no samples to evaluate on")
    means = {name: float(value) / units for name, value in zip(task.metrics, sums, strict=True)}
    return Result(loss / units, dict(task.report(loss / units, means)), samples)


def batches_of(found: Trained, part: Parts, batch_size: int) -> Iterator[DataBatch]:
    """Yield the samples of a part of a job's data in batches; all of them in the order of the data, if it has one.

    Raises HorizonError.
    """
    spec = found.job.data
    info = describe(spec, channels_for(found.job), _encoding_for(found))
    if info is None:
        where = spec.folder or spec.path or spec.name
        raise DataError(f"data: {where} is not here; say where the data lies with --data, or data= in Python")
    _check_fit(found, info)
    if info.characters:  # a model knows characters by the numbers that they had in training
        info = replace(info, characters=found.info.characters, outputs=found.info.outputs)
    if replace(info, unreadable=found.info.unreadable) == found.info:
        info = found.info  # which knows what cannot be read
    opened = load_data(spec, info, cache_folder() / "data")
    if part == "all" and opened.whole is not None and not any(info.unreadable or ()):
        for indices in _places(info.train + info.held_out, batch_size):
            yield DataBatch(opened.whole, indices)
        return
    for name, length in (("train", info.train), ("held-out", info.held_out)):
        if part in (name, "all"):
            for indices in _places(length, batch_size):
                yield opened.batch(name == "train", indices)


def _places(length: int, batch_size: int) -> Iterator[Tensor]:
    """Yield the numbers below `length`, as many at a time as there are in a batch."""
    return (indices for indices in torch.arange(length).split(batch_size) if len(indices))


def _encoding_for(found: Trained) -> Mapping[str, Any] | None:
    """Return how content of the job's data becomes numbers, if the model was trained on data of that kind."""
    before = job_of(found.path, found.metadata).data
    return found.info.encoding if before.name == found.job.data.name else None


def _check_own_content(found: Trained) -> None:
    """Raise DataError if other data than that of the training is scaled or numbered by its own content."""
    before, spec = job_of(found.path, found.metadata).data, found.job.data
    if (spec.name, spec.path) == (before.name, before.path) or _encoding_for(found) is not None:
        return
    if spec.name == "table" and spec.normalize:
        raise DataError(
            f"data.normalize: the numbers of {spec.path} would be scaled by their own mean and not by that of "
            f"{before.path or before.name}; train with data.normalize: false and scale the columns yourself"
        )
    if spec.source.kind == "text" and spec.tokens == "characters" and not found.info.characters:
        raise DataError(
            f"data.tokens: the characters of {spec.path} would be numbered in another way than those of "
            f"{before.path or 'the sonnets'}, which a checkpoint of this age does not tell; train again"
        )


def _check_fit(found: Trained, info: DataInfo) -> None:
    """Raise DataError if the model was trained on data of another kind."""
    known, name = found.info, found.job.data.name
    if [spec.shape for spec in info.inputs] != [spec.shape for spec in known.inputs]:
        shapes = [" and ".join(str(list(spec.shape)) for spec in one.inputs) for one in (info, known)]
        raise DataError(
            f"data: {name} has inputs of shape {shapes[0]}, but the model was trained on {shapes[1]}; for images, set "
            "data.image_size"
        )
    if known.labels and info.labels and info.labels != known.labels:
        names = [", ".join(one.labels) for one in (info, known)]
        raise DataError(f"data: {name} has the classes {names[0]}, but the model was trained on {names[1]}")
    _check_own_content(found)
    if info.outputs > known.outputs and not known.characters:
        raise DataError(
            f"data: {name} has {info.outputs} classes or values, but the model was trained on {known.outputs}"
        )


@torch.no_grad()
def outputs_of(found: Trained, inputs: Inputs) -> Tree:
    """Return the outputs of a model for a batch. Raises ModelError."""
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    try:
        positional, named = found.arguments(tensors)
        result: Tree = found.module(*positional, **named)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ModelError(f"{found.job.model.name} cannot be used on inputs of shape {shapes}: {error}") from error
    return result
