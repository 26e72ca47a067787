"""Says which checkpoints are kept, and finds the best one."""

from __future__ import annotations

from pathlib import Path

from horizonml.errors import CheckpointError
from horizonml.state.best import KEPT
from horizonml.state.shards import METADATA, Metadata, find, read_metadata, step_of, steps, verify


def superfluous(folder: Path, step: int, keep: int, keeps_best: bool) -> list[Path]:
    """Return the checkpoints to delete once that of `step` is saved: all but the newest `keep`, and the best one.

    Those of later steps are another group's. A checkpoint that was to be the best may not have been saved; then the
    best one before it is kept.
    """
    there = [path for path in steps(folder) if step_of(path) <= step]
    best = next((path for path in there if _was_best(path)), None) if keeps_best else None
    return [path for path in there[keep:] if path != best]


def _was_best(path: Path) -> bool:
    """Return whether a checkpoint was the best one when it was saved."""
    try:
        best = read_metadata(path).best.get(KEPT)
    except CheckpointError:
        return False
    return best is not None and best.step == step_of(path)


def find_best(path: Path) -> tuple[Path, Metadata]:
    """Return the best checkpoint of a run's folder by the metric of `checkpoint.keep_best`, and its metadata.

    Raises CheckpointError if there is none, or if it is damaged.
    """
    if (path / METADATA).exists():
        path = path.parent
    for folder in (path, path / "checkpoints"):
        for step in steps(folder):
            if _was_best(step):
                metadata = read_metadata(step)
                verify(step, metadata)
                return step, metadata
    find(path)  # says what is wrong if there is no checkpoint at all
    raise CheckpointError(f"{path} has no best checkpoint: train with checkpoint.keep_best, for example held_out_loss")
