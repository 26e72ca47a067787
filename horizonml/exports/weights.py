"""Reads the trained weights of a checkpoint without holding them in memory: tensors are views of the shards' files."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from horizonml.errors import CheckpointError
from horizonml.state.shards import Metadata, opened

_PREFIX = "model/"  # of parameters and buffers; the optimizer's state is not exported


def mapped_weights(path: Path, metadata: Metadata) -> dict[str, Tensor]:
    """Return a checkpoint's parameters and buffers by their names in the original model.

    The shards are mapped: a tensor is read from disk when it is used, and the system can take its memory back. Raises
    CheckpointError.
    """
    with opened(path, metadata.shards) as (names, read):
        weights = {name.removeprefix(_PREFIX): read(name) for name in names if name.startswith(_PREFIX)}
    if not weights:
        raise CheckpointError(f"{path} has no parameters")
    return weights
