"""Exports the weights as one safetensors file."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from horizonml.api.exports.formats import check_weights


def write(weights: Mapping[str, Tensor], draft: Path, about: Mapping[str, str]) -> None:
    """Write the file, tensor by tensor, with `about` in its header. Raises OSError."""
    try:
        save_file(dict(weights), draft, metadata={"format": "pt", **about})
    except safetensors.SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from error


def verify(weights: Mapping[str, Tensor], draft: Path) -> str:
    """Return, in words, that the file holds exactly these weights. Raises ExportError."""
    return check_weights(draft.name, weights, load_file(draft))
