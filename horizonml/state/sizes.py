"""Tells how large the files and messages of a state can be at most, before memory or disk is taken for them.

What a rank or a checkpoint announces is compared with this: the model says what there can be.
"""

from __future__ import annotations

from collections.abc import Iterable

from horizonml.errors import CheckpointError
from horizonml.plan.plan import Plan
from horizonml.state.train_state import TrainState

_HEADER, _ENTRY = 1 << 16, 512  # the most bytes of a file's header, and of a tensor's entry in it besides its name
_TIMES = 4  # another optimizer than the job's may have written a checkpoint, and keep more


def most_bytes(state: TrainState, layers: Iterable[int]) -> int:
    """Return the most bytes of a file with the whole state of these layers, as the job's optimizer keeps it."""
    held = (state.expected(layer) for layer in layers)
    return _HEADER + sum(tensor.nbytes + len(key) + _ENTRY for tensors in held for key, tensor in tensors.items())


def most_of_shards(state: TrainState, plan: Plan) -> list[int]:
    """Return the most bytes of each stage's shard."""
    return [most_bytes(state, range(stage.start, stage.stop)) for stage in plan.stages]


def check_shard(state: TrainState, name: str, start: int, stop: int, announced: int) -> None:
    """Raise CheckpointError if a shard of layers `start` to `stop - 1` is said to be larger than it can be."""
    layers = range(start, min(stop, len(state.model.chain)))
    most = _TIMES * most_bytes(state, layers)
    if announced > most:
        raise CheckpointError(
            f"{name} is said to have {announced:,} bytes, but the state of layers {start} to {stop - 1} has at most "
            f"{most:,}; the checkpoint belongs to another model, or its metadata is false"
        )
