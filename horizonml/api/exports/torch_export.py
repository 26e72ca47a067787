"""Exports the model as an archive of torch.export, which runs without the model's code."""

from __future__ import annotations

from pathlib import Path

import torch

from horizonml.api.exports.formats import Agreement, Format, Samples, compare
from horizonml.api.exports.graph import batches, joined, quietly, record
from horizonml.api.exports.trained import Trained, flat_tensors


def write(trained: Trained, samples: Samples, draft: Path) -> None:
    """Write the archive; the batch dimension of every input may have any size. Raises ExportError or OSError."""
    program = record(trained, samples, Format.TORCH_EXPORT)
    with quietly(trained, Format.TORCH_EXPORT):
        torch.export.save(program, draft)


def verify(trained: Trained, samples: Samples, draft: Path) -> Agreement:
    """Return how the outputs of the reloaded archive agree with the model's. Raises ExportError if they do not."""
    found = []
    with quietly(trained, Format.TORCH_EXPORT), torch.no_grad():
        module = torch.export.load(draft).module()
        for inputs in batches(samples):
            args, kwargs = trained.arguments(inputs)
            found.append(flat_tensors(module(*args, **kwargs)))
    return compare(draft.name, samples.words, trained.outputs(samples.inputs), joined(found))
