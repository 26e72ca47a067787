"""Checkpoints as they lie on disk.

    checkpoints/step-00000230/
        checkpoint.json          for people: step, accuracy, job, plan, and every shard's SHA-256
        stage-0.safetensors      parameters, buffers and optimizer state of stage 0's layers, by original name
        stage-1.safetensors ...

Nothing in a checkpoint is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from horizonml import __version__
from horizonml.errors import CheckpointError
from horizonml.job import Job

FORMAT = 1
METADATA = "checkpoint.json"


def steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True)


def find(path: Path) -> Path:
    """The newest intact checkpoint at `path`: itself one, or a run's folder. Raises CheckpointError."""
    if (path / METADATA).exists():
        return path
    problems = []
    for folder in (path, path / "checkpoints"):
        for step in steps(folder):
            try:
                verify(step, read_metadata(step))
            except CheckpointError as error:
                problems.append(str(error))
            else:
                return step
    raise CheckpointError("; ".join(problems) or f"no checkpoint in {path}; give a run's folder or a step-* folder")


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a checkpoint. Raises CheckpointError."""
    try:
        metadata = json.loads((path / METADATA).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {METADATA} is missing or damaged ({error})") from error
    return check(metadata, path)


def check(metadata: Any, path: Path) -> dict[str, Any]:
    """The metadata, if it is well-formed: it may come from a damaged disk. Raises CheckpointError."""
    try:
        if metadata["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {metadata['format']} is not known to HorizonML {__version__}")
        metadata["compatible"].items(), int(metadata["step"])
        for stage in metadata["plan"]["stages"]:
            int(stage["start"]), int(stage["stop"])
        for name, shard in metadata["shards"].items():
            int(shard["bytes"]), str(shard["sha256"])
            if not re.fullmatch(r"stage-\d+\.safetensors", name):
                raise ValueError(f"{name!r} is not the name of a shard")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: {METADATA} is missing or damaged ({error})") from error
    checked: dict[str, Any] = metadata
    return checked


def completed(folder: Path, job: Job) -> bool:
    """Whether the newest checkpoint in `folder` is the end of exactly this job."""
    newest = next(iter(steps(folder)), None)
    if newest is None:
        return False
    try:
        metadata = read_metadata(newest)
        return metadata["complete"] is True and Job.model_validate(metadata["job"]).digest() == job.digest()
    except (CheckpointError, KeyError, ValueError):
        return False


def verify(path: Path, metadata: dict[str, Any], require_all: bool = True, content: bool = True) -> list[str]:
    """The shards that are here and intact. Raises CheckpointError for a damaged one, or a missing one if required.

    Without `content` only their sizes are looked at.
    """
    intact = []
    for name, shard in metadata["shards"].items():
        file = path / name
        if not file.exists() and not require_all:
            continue
        try:
            size = file.stat().st_size
            if size != shard["bytes"]:
                raise CheckpointError(f"{file} is damaged: it has {size} bytes instead of {shard['bytes']}")
            if content and digest(file) != shard["sha256"]:
                raise CheckpointError(f"{file} is damaged: its content does not match its SHA-256")
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
        intact.append(name)
    return intact


@contextmanager
def opened(path: Path, metadata: dict[str, Any]) -> Iterator[tuple[list[str], Any]]:
    """The names of all tensors in a checkpoint's shards on this machine, and a function that reads one by name."""
    files = [path / name for name in metadata["shards"] if (path / name).exists()]
    try:
        handles = [safetensors.safe_open(file, framework="pt") for file in files]
        where = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118  (not a dict)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    yield list(where), lambda name: where[name].get_tensor(name)


def export(source: Path, target: Path) -> dict[str, Any]:
    """Write a checkpoint's parameters and buffers as a plain state dict; returns its metadata.

    The file can be read by `torch.load(target, weights_only=True)` and fits the original model. Raises
    CheckpointError.
    """
    path = find(source)
    metadata = read_metadata(path)
    verify(path, metadata)
    with opened(path, metadata) as (names, read):
        weights: dict[str, Tensor] = {
            name.removeprefix("model/"): read(name) for name in names if name.startswith("model/")
        }
    hidden = target.with_name(f".{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, hidden)
        os.replace(hidden, target)
    except OSError as error:
        hidden.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error
    return metadata


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
