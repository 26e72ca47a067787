"""Exports the model of a checkpoint to a file that is checked against the model before it has its name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from horizonml.errors import CheckpointError, DataError, ExportError, JobError
from horizonml.exports import onnx, safetensors, state_dict, torch_export
from horizonml.exports.card import Subject, write_card
from horizonml.exports.formats import AUTO, Format, choose_format
from horizonml.exports.samples import find_samples, noise
from horizonml.exports.trained import info_of, job_of, load_trained
from horizonml.exports.weights import open_weights
from horizonml.files import cache_folder, staged, write_atomically
from horizonml.state.shards import find

_log = logging.getLogger(__name__)
VERIFY = 16  # samples


@dataclass(frozen=True)
class Exported:
    """Tells what was exported, and how it was checked."""

    output: Path
    format: Format
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
) -> Exported:
    """Export the model of a checkpoint, or of the newest intact one in a run's folder.

    `format` is "state-dict", "safetensors", "onnx" or "torch-export"; with "auto" the ending of `output` says it. The
    file is compared with the model on `verify` held-out samples, or on noise where this machine does not have the data;
    0 leaves the comparison out. With `card`, a model card is written beside it. `overrides` change fields of the
    checkpoint's job, such as `data.folder=/mnt/data`.

    A file that fails the comparison is deleted, and what was there before stays. Raises HorizonError.
    """
    source, target = Path(checkpoint), Path(output)
    chosen = choose_format(target, format)
    if verify < 0:
        raise JobError(f"--verify: {verify} is negative; 0 leaves the comparison out")
    chosen.require_packages()
    write = _export_graph if chosen.has_graph else _export_weights
    try:
        with staged(target) as draft:
            about = write(source, target, draft, chosen, verify, overrides)
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


def _export_weights(
    source: Path, target: Path, draft: Path, format: Format, verify: int, overrides: Sequence[str]
) -> Subject:
    """Write the weights from shard to file, without building the model or running any of its code."""
    path, metadata = find(source)
    job = info = None
    try:
        job = job_of(path, metadata, overrides)
        info = info_of(path, metadata, job)
    except CheckpointError as error:
        _log.warning("no model card is written: %s", error)
    except DataError:
        info = None  # the card says that it is not known
    check = "not verified"
    with open_weights(path, metadata) as weights:
        if format is Format.STATE_DICT:
            state_dict.write(weights, draft)
        else:
            safetensors.write(weights, draft, {"step": str(metadata.step)})
        if verify:
            check = (state_dict if format is Format.STATE_DICT else safetensors).verify(weights, draft)
        values = sum(tensor.numel() for tensor in weights.values())
    return Subject(target, draft, format, path, metadata, job, info, values, check)


def _export_graph(
    source: Path, target: Path, draft: Path, format: Format, verify: int, overrides: Sequence[str]
) -> Subject:
    """Build the model, record its computation, and compare."""
    trained = load_trained(source, overrides)
    if verify:
        samples = find_samples(trained.job.data, trained.info, verify, cache_folder() / "data")
    else:
        samples = noise(trained.info, 1, "nothing is verified")
    kind = onnx if format is Format.ONNX else torch_export
    kind.write(trained, samples, draft)
    check = "not verified"
    if verify:
        check = f"{samples.words}: {kind.verify(trained, samples, draft).words()}"
    values = sum(tensor.numel() for tensor in trained.module.state_dict().values())
    return Subject(target, draft, format, trained.path, trained.metadata, trained.job, trained.info, values, check)
