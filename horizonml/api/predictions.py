"""Writes what a trained model predicts as a table, a row for each sample."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from horizonml.api.evaluation import Parts, batches_of, outputs_of
from horizonml.data.dataset import DataBatch, Tree
from horizonml.data.files import FolderSource
from horizonml.data.images import ImageSplit
from horizonml.data.spec import IMAGES
from horizonml.errors import DataError
from horizonml.exports.trained import Trained
from horizonml.files import write_atomically, writing
from horizonml.tasks.classification import Classification, MultiLabel


def write_predictions(found: Trained, files: Sequence[Path], part: Parts, batch_size: int, out: Path) -> int:
    """Write a CSV file of what a model predicts for image files, or else for its job's data; return the rows.

    Raises HorizonError.
    """
    text = io.StringIO(newline="")
    table, written = csv.writer(text, lineterminator="\n"), 0
    batches = _files(found, files, batch_size) if files else batches_of(found, part, batch_size)
    for batch in batches:
        values = _values(found, outputs_of(found, batch.inputs(0, batch.size)))
        if not written:
            table.writerow(_header(found, values.shape[1]))
        for row in values:
            name = str(files[written]) if files else str(written)
            table.writerow([name, *_cells(found, row)])
            written += 1
    if not written:
        raise DataError("data: there are no samples to predict")
    with writing(out):
        write_atomically(out, text.getvalue().encode())
    return written


def _files(found: Trained, files: Sequence[Path], batch_size: int) -> Iterator[DataBatch]:
    """Yield image files in batches, prepared as those of the training. Raises DataError."""
    spec, shape = found.job.data, found.info.inputs[0].shape
    if spec.name not in IMAGES:
        raise DataError(
            f"image files can be given for a model that was trained on one of the data sets {', '.join(IMAGES)}, and "
            f"this one was trained on {spec.name}; use --data"
        )
    if missing := [path for path in files if not path.is_file()]:
        raise DataError(f"{missing[0]} is not a file")
    source = FolderSource([(path, 0) for path in files], [], shape[-1])
    split = ImageSplit(source, torch.arange(len(files)), found.info, spec)
    for rows in torch.arange(len(files)).split(batch_size):
        yield DataBatch(split, rows)


def _values(found: Trained, outputs: Tree) -> Tensor:
    """Return the numbers of a batch's rows: probabilities for classes and labels. Raises DataError."""
    if not isinstance(outputs, Tensor) or outputs.dim() > 2:
        shape = f"of shape {list(outputs.shape[1:])}" if isinstance(outputs, Tensor) else "of several tensors"
        if found.job.data.name == "text":
            raise DataError(
                f"{found.job.model.name} was trained on texts, whose predictions are no table; let it write with "
                "horizonml generate, or take the outputs from horizonml.predict in Python"
            )
        raise DataError(
            f"{found.job.model.name} returns values {shape} for each sample, which do not fit into a row of a table; "
            "use horizonml.predict in Python"
        )
    values = outputs.reshape(len(outputs), -1).float()
    if isinstance(found.task, Classification):
        return values.softmax(1)
    return values.sigmoid() if isinstance(found.task, MultiLabel) else values


def _names(found: Trained, values: int) -> list[str]:
    """Return the names of classes, labels or values, or their numbers."""
    return list(found.info.labels) if len(found.info.labels) == values else [str(number) for number in range(values)]


def _header(found: Trained, values: int) -> list[str]:
    if isinstance(found.task, Classification):
        return ["sample", "class", *(f"probability of {name}" for name in _names(found, values))]
    what = "probability of" if isinstance(found.task, MultiLabel) else "value"
    return ["sample", *(f"{what} {name}" for name in _names(found, values))]


def _cells(found: Trained, row: Tensor) -> list[str]:
    """Return a sample's cells, after its name."""
    numbers = [f"{value:.6g}" for value in row.tolist()]
    if isinstance(found.task, Classification):
        return [_names(found, len(row))[int(row.argmax())], *numbers]
    return numbers
