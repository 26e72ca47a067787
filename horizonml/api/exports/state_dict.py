"""Exports the weights as a PyTorch state dict, which `torch.load(..., weights_only=True)` reads."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from horizonml.api.exports.formats import check_weights


def write(weights: Mapping[str, Tensor], draft: Path) -> None:
    """Write the file, tensor by tensor. Raises OSError."""
    draft.touch()  # torch does not say why it cannot open a file
    try:
        torch.save(dict(weights), draft)
    except RuntimeError as error:  # torch's own writer does not say why it cannot write, either
        raise OSError(errno.ENOSPC, "writing ended too early; the disk may be full") from error


def verify(weights: Mapping[str, Tensor], draft: Path) -> str:
    """Return, in words, that the file holds exactly these weights. Raises ExportError."""
    found = torch.load(draft, weights_only=True, mmap=True, map_location="cpu")
    return check_weights(draft.name, weights, found)
