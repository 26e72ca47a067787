"""Reads the trained weights of a checkpoint without holding them in memory: tensors are views of the shards' files."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from horizonml.errors import CheckpointError
from horizonml.state.average import AVERAGE, sources
from horizonml.state.shards import Metadata, opened
from horizonml.text import some


def mapped_weights(path: Path, metadata: Metadata, average: bool | None = None) -> tuple[dict[str, Tensor], bool]:
    """Return a checkpoint's parameters and buffers by their names in the original model, and whether they are averages.

    With `average`, parameters that have a moving average are taken from it; without a choice, they are if the run's own
    evaluations did so (`ema.evaluate`), and the weights are those that the recorded metrics belong to. The shards are
    mapped: a tensor is read from disk when it is used, and the system can take its memory back. Raises CheckpointError.
    """
    with opened(path, metadata.shards) as (names, read):
        found = sources(names, _evaluated(metadata) if average is None else average)
        # What the optimizer keeps of a parameter is there only if the parameter is.
        entries = (
            name.removeprefix("optimizer/").rpartition("/")[0] for name in names if name.startswith("optimizer/")
        )
        if lost := sorted({*entries} - {*found}):
            raise CheckpointError(f"{path} has no values for {some(lost)}, whose optimizer state it has")
        weights = {name: read(source) for name, source in found.items()}
    if not weights:
        raise CheckpointError(f"{path} has no parameters")
    averaged = any(source == f"optimizer/{name}/{AVERAGE}" for name, source in found.items())
    if average and not averaged:
        raise CheckpointError(f"{path} has no averages of the parameters: train with ema.decay, for example 0.999")
    return weights, averaged


def _evaluated(metadata: Metadata) -> bool:
    """Tell whether the run evaluated the averages of its parameters, as far as its checkpoint says."""
    ema = (metadata.job or {}).get("ema") or {}
    return bool(ema.get("decay")) and bool(ema.get("evaluate", True))
