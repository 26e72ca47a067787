"""Reads the trained weights of a checkpoint without holding them in memory: tensors are views of the shards' files."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from horizonml.errors import CheckpointError
from horizonml.state.shards import Metadata, opened

_PREFIX = "model/"  # of parameters and buffers; the optimizer's state is not exported


def mapped_weights(path: Path, metadata: Metadata, average: bool = False) -> dict[str, Tensor]:
    """Return a checkpoint's parameters and buffers by their names in the original model.

    With `average`, parameters that have a moving average are taken from it. The shards are mapped: a tensor is read
    from disk when it is used, and the system can take its memory back. Raises CheckpointError.
    """
    with opened(path, metadata.shards) as (names, read):
        own = [name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)]
        available = set(names)
        averages = {name: f"optimizer/{name}/average" for name in own} if average else {}
        averages = {name: other for name, other in averages.items() if other in available}
        weights = {name: read(averages.get(name, f"{_PREFIX}{name}")) for name in own}
    if not weights:
        raise CheckpointError(f"{path} has no parameters")
    if average and not averages:
        raise CheckpointError(f"{path} has no averages of the parameters: train with ema.decay, for example 0.999")
    return weights
