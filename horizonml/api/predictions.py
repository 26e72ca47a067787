"""Implements predictions by a trained model: tables with a row for each sample, and generated text."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from horizonml.api.evaluation import CheckpointLike, Parts, batches_of, outputs_of, trained
from horizonml.api.exports.trained import Trained
from horizonml.api.jobs import ModelLike
from horizonml.data.dataset import DataBatch, Tree
from horizonml.data.files import FolderSource
from horizonml.data.images import ImageSplit
from horizonml.data.spec import SOURCES
from horizonml.data.text import Tokens, tokens_for
from horizonml.errors import DataError, JobError, ModelError
from horizonml.files import write_atomically, writing
from horizonml.tasks.classification import Classification, MultiLabel
from horizonml.tasks.task import main_tensor


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
    if spec.source.kind != "images":
        images = ", ".join(name for name, source in SOURCES.items() if source.kind == "images")
        raise DataError(
            f"image files can be given for a model that was trained on one of the data sets {images}, and "
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
        if found.job.data.source.kind == "text":
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


def generate(
    checkpoint: CheckpointLike,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
    model: ModelLike = None,
) -> str:
    """Return the text with which a trained language model goes on from a prompt, without the prompt.

    Parameters:
        checkpoint: A run, the folder of a run, or the folder of a checkpoint.
        prompt: How the text begins.
        tokens: How many tokens are written: characters, bytes, or a tokenizer's, as the job has it.
        temperature: How much the model dares: each token is drawn by probabilities to the power of 1 / temperature. At
            0, it is always the most probable one.
        seed: Decides what is drawn; the same seed gives the same text.
        model: The model, if it was given to `train` as an object and `checkpoint` is a folder.

    Raises HorizonError.
    """
    if tokens < 1:
        raise JobError(f"tokens: {tokens} is too small; ask for one token at least")
    if not temperature >= 0:
        raise JobError(f"temperature: {temperature} is no temperature; give 0 or more")
    found = trained(checkpoint, model)
    vocabulary = vocabulary_of(found)
    try:
        start = vocabulary.encode(prompt)
    except DataError as error:
        raise DataError(f"prompt: {error}") from None
    if not len(start):
        raise DataError("prompt: there is nothing to go on from; give a word or a character")
    return vocabulary.decode(_written(found, start.long(), tokens, temperature, seed))


def vocabulary_of(found: Trained) -> Tokens:
    """Return the tokens that a language model was trained on. Raises DataError if the model was trained on no text."""
    data = found.job.data
    if data.source.kind != "text":
        raise DataError(f"{found.path}: a text is written by models that were trained on texts, not on {data.name}")
    if data.tokens == "characters" and not found.info.characters:
        raise DataError(f"{found.path}: a checkpoint of this age does not tell which characters there are; train again")
    return tokens_for(data.tokens, found.info.characters)


def _written(found: Trained, start: Tensor, count: int, temperature: float, seed: int) -> list[int]:
    """Return the numbers of `count` tokens that follow those in `start`."""
    (context,), generator = found.info.inputs[0].shape, torch.Generator().manual_seed(seed)
    numbers = start.tolist()
    for _ in range(count):
        seen = numbers[-context:]
        # The model gets the shape that it was trained on; nothing depends on what comes later.
        row = torch.tensor([seen + [0] * (context - len(seen))])
        logits = main_tensor(outputs_of(found, row), "logits")[0, len(seen) - 1].double()
        if not bool(logits.isfinite().all()):
            raise ModelError(f"{found.path}: the model's outputs are not finite, so there is nothing to draw from")
        if temperature == 0:
            numbers.append(int(logits.argmax()))
            continue
        shares = ((logits - logits.max()) / temperature).softmax(0)
        numbers.append(int(torch.multinomial(shares, 1, generator=generator)))
    return list(numbers[len(start) :])
