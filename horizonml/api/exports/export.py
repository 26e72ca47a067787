"""Exports the model of a checkpoint to a file that is checked against the model before it has its name."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from horizonml.api.exports import formats
from horizonml.api.exports.card import Subject, write_card
from horizonml.api.exports.formats import AUTO, ExportFormat, check_weights, choose_format, find_samples, noise
from horizonml.api.exports.trained import Trained, info_of, job_of, load_trained, mapped_weights, refuse_incomplete_data
from horizonml.data.dataset import DataInfo
from horizonml.errors import CheckpointError, DataError, ExportError, JobError
from horizonml.files import cache_folder, staged, write_atomically
from horizonml.job.schema import Job
from horizonml.state.shards import find

_log = logging.getLogger(__name__)
VERIFY = 16  # samples


@dataclass(frozen=True)
class Exported:
    """Tells what was exported, and how it was checked."""

    output: Path
    format: ExportFormat
    step: int  # of the checkpoint
    metrics: dict[str, int | float]  # of its last evaluation
    check: str  # what the verification found, in words
    card: Path | None  # the model card


def export(
    checkpoint: Path | str,
    output: Path | str,
    format: str = AUTO,
    verify: int = VERIFY,
    card: bool = True,
    overrides: Sequence[str] = (),
    average: bool | None = None,
) -> Exported:
    """Export the model of a checkpoint, or of the newest intact one in a run's folder.

    `format` is "state-dict", "safetensors", "onnx" or "torch-export"; with "auto" the ending of `output` says it. The
    file is compared with the model on `verify` held-out samples, or on noise where this machine does not have the data;
    0 leaves the comparison out. With `card`, a model card is written beside it. `overrides` change fields of the
    checkpoint's job, such as `data.folder=/mnt/data`. With `average`, the parameters are their moving averages;
    without a choice, they are if the run evaluated those.

    A file that fails the comparison is deleted, and what was there before stays. Raises HorizonError.
    """
    target = Path(output)
    chosen = choose_format(target, format)
    if verify < 0:
        raise JobError(f"--verify: {verify} is negative; 0 leaves the comparison out")
    chosen.require_packages()
    source = Path(checkpoint)
    write: Callable[[Path], Subject]
    if not chosen.has_graph:
        write = _Weights(source, chosen, verify, overrides, average).write
    else:
        write = partial(_write_graph, load_trained(source, overrides, average=average), chosen, verify)
    try:
        with staged(target) as draft:
            about = write(draft)
            text = write_card(about) if card and about.job is not None else None
        if text is not None:
            write_atomically(card_of(target), text.encode())
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error.strerror or error}") from error
    metadata, where = about.metadata, card_of(target) if text is not None else None
    return Exported(target, chosen, metadata.step, dict(metadata.metrics), about.check, where)


def card_of(output: Path) -> Path:
    """Return where the model card of an exported file is written."""
    return output.with_name(f"{output.name}.md")


class _Weights:
    """Goes from shard to file, without building the model or running any of its code."""

    def __init__(
        self, source: Path, format: ExportFormat, verify: int, overrides: Sequence[str], average: bool | None
    ) -> None:
        self._format, self._verify, self._average = format, verify, average
        self._path, self._metadata = find(source)
        self._job: Job | None = None
        self._info: DataInfo | None = None
        try:
            self._job = job_of(self._path, self._metadata, overrides)
            self._info = info_of(self._path, self._metadata, self._job)
        except CheckpointError as error:
            _log.warning("no model card is written: %s", error)
        except DataError:
            self._info = None  # the card says that it is not known

    def write(self, draft: Path) -> Subject:
        """Write and verify the file. Raises OSError, or ExportError if it is not what was to be written."""
        check = "not verified"
        weights, averaged = mapped_weights(self._path, self._metadata, self._average)
        refuse_incomplete_data(self._path, self._job, self._info, weights)
        self._save(weights, draft)
        if self._verify:
            check = check_weights(draft.name, weights, self._load(draft))
        values = sum(tensor.numel() for tensor in weights.values())
        return Subject(draft, self._format, self._path, self._metadata, self._job, self._info, values, check, averaged)

    def _save(self, weights: dict[str, Tensor], draft: Path) -> None:
        """Write the file, tensor by tensor. Raises OSError."""
        draft.touch()  # torch does not say why it cannot open a file
        try:
            if self._format is ExportFormat.STATE_DICT:
                torch.save(weights, draft)
            else:
                save_file(weights, draft, metadata={"format": "pt", "step": str(self._metadata.step)})
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from error
        except RuntimeError as error:  # torch does not say why it cannot write, either
            raise OSError(errno.ENOSPC, "writing ended too early; the disk may be full") from error

    def _load(self, draft: Path) -> Mapping[str, Tensor]:
        if self._format is ExportFormat.STATE_DICT:
            found: Mapping[str, Tensor] = torch.load(draft, weights_only=True, mmap=True, map_location="cpu")
            return found
        return load_file(draft)


def _write_graph(trained: Trained, format: ExportFormat, verify: int, draft: Path) -> Subject:
    """Record the model's computation, write it, and compare.

    Raises OSError, or ExportError if the file does not compute what the model does.
    """
    if verify:
        samples = find_samples(trained.job.data, trained.info, verify, cache_folder() / "data")
    else:
        samples = noise(trained.info, 1, "nothing is verified")
    formats.write(format, trained, samples, draft)
    check = "not verified"
    if verify:
        check = f"{samples.words}: {formats.verify(format, trained, samples, draft).words()}"
    values = sum(tensor.numel() for tensor in trained.module.state_dict().values())
    return Subject(
        draft, format, trained.path, trained.metadata, trained.job, trained.info, values, check, trained.averaged
    )
