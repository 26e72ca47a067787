"""Checkpoints: the state of a training at a step boundary, whole or not there at all.

    checkpoints/step-00000230/
        checkpoint.json          for people: step, accuracy, job, plan, and every shard's SHA-256
        stage-0.safetensors      parameters, buffers and optimizer state of stage 0's layers, by original name
        stage-1.safetensors ...

Shards are written into a hidden folder, made durable and checked in; only then is the folder renamed, which is what
makes it a checkpoint. Tensors carry the model's own names, so a checkpoint can be resumed with any plan and any
world size. Nothing in a checkpoint is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from horizonml import __version__
from horizonml.engine.engine import Engine
from horizonml.engine.group import Group
from horizonml.errors import CheckpointError
from horizonml.files import sync_folder, write_atomically

_log = logging.getLogger(__name__)
_FORMAT = 1
_METADATA = "checkpoint.json"


class Checkpoints:
    """The checkpoints of a run, as one rank of its group sees them."""

    def __init__(self, folder: Path, group: Group, hosts: list[str], keep: int, compatible: dict[str, Any]) -> None:
        """`hosts[r]` is where rank r runs; ranks of one host share its files, others may or may not.

        `compatible` is what a checkpoint must agree with to be resumed.
        """
        self._folder, self._group, self._keep, self._compatible = folder, group, keep, compatible
        self._host_lead = hosts.index(hosts[group.rank]) == group.rank
        if self._host_lead:
            for leftover in folder.glob(".step-*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def save(self, engine: Engine, step: int, details: dict[str, Any]) -> Path | None:
        """Write a checkpoint; all ranks call this after the same step.

        `details` go into the metadata. Returns its folder, or None if a rank could not write its shard: training can
        go on, and the checkpoints there were are kept.
        """
        started = time.perf_counter()
        target = self._folder / f"step-{step:08d}"
        hidden = self._folder / f".step-{step:08d}"
        report = self._write_shard(engine, hidden) if engine.member == 0 else {}
        reports = self._group.gather_json(report)
        failed = {rank: report["error"] for rank, report in enumerate(reports) if "error" in report}
        metadata = {
            "format": _FORMAT,
            "horizonml": __version__,
            "torch": torch.__version__,
            "step": step,
            **details,
            "compatible": self._compatible,
            "plan": engine.plan.to_json(),
            "shards": {report["file"]: report for report in reports if report and "error" not in report},
        }
        if not failed:
            # On a file system that all share, rank 0 has done it before the others look.
            if self._group.rank == 0:
                failed.update(self._commit(hidden, target, metadata))
            self._group.gather_json(None)
            if self._group.rank != 0 and self._host_lead and hidden.is_dir():
                failed.update(self._commit(hidden, target, metadata))
        if failed:
            for rank, reason in failed.items():
                _log.warning("checkpoint of step %d not saved: rank %d: %s", step, rank, reason)
            shutil.rmtree(hidden, ignore_errors=True)
            return None
        if self._host_lead:
            self._prune()
        _log.debug("checkpoint of step %d took %.2f s", step, time.perf_counter() - started)
        return target

    def _write_shard(self, engine: Engine, folder: Path) -> dict[str, Any]:
        name = f"stage-{engine.stage_number}.safetensors"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {key: value.contiguous() for key, value in engine.state().items()}
            save_file(tensors, folder / name)
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())
            return {"file": name, "sha256": _digest(folder / name), "bytes": (folder / name).stat().st_size}
        except (OSError, safetensors.SafetensorError) as error:
            return {"error": str(error)}

    def _commit(self, hidden: Path, target: Path, metadata: dict[str, Any]) -> dict[int, str]:
        try:
            write_atomically(hidden / _METADATA, (json.dumps(metadata, indent=2) + "\n").encode())
            if target.exists():
                shutil.rmtree(target)
            hidden.rename(target)
            sync_folder(self._folder)
        except OSError as error:
            return {self._group.rank: str(error)}
        return {}

    def _prune(self) -> None:
        for old in _steps(self._folder)[self._keep :]:
            shutil.rmtree(old, ignore_errors=True)

    def resume(self, engine: Engine) -> dict[str, Any] | None:
        """Load the newest intact checkpoint that all ranks can read; returns its metadata, None if there is none.

        Damaged ones are passed over by name. Raises CheckpointError if all are damaged, or if the one to resume
        belongs to another model or data.
        """
        intact: dict[str, list[str]] = {}
        problems: list[str] = []
        if self._host_lead:
            for path in _steps(self._folder):
                try:
                    metadata = read_metadata(path)
                    intact[path.name] = verify(path, metadata, require_all=False)
                except CheckpointError as error:
                    problems.append(str(error))
                    _log.warning("%s; trying the one before", error)
        seen = self._group.gather_json({"intact": intact, "problems": problems})
        problems = [problem for report in seen for problem in report["problems"]]
        shared: dict[str, set[str]] = {}
        for report in seen:
            for name, shards in report["intact"].items():
                shared.setdefault(name, set()).update(shards)
        for name in sorted(shared, reverse=True):
            found = self._group.gather_json(self._try(engine, self._folder / name, shared[name]))
            problem = next((text for text in found if isinstance(text, str)), None)
            if problem is None:
                resumed: dict[str, Any] = found[self._group.rank]
                return resumed
            if " belongs to " in problem:
                raise CheckpointError(problem)
            problems.append(problem)
            _log.warning("%s; trying the one before", problem)
        if problems:
            raise CheckpointError("no checkpoint can be resumed (--fresh starts over): " + "; ".join(problems))
        return None

    def _try(self, engine: Engine, path: Path, shards: set[str]) -> dict[str, Any] | str:
        """Load a checkpoint of which `shards` are intact on some machine; its metadata, or what is wrong."""
        try:
            metadata = read_metadata(path)
            if not set(metadata["shards"]) <= shards:
                return f"{path}: shards {sorted(set(metadata['shards']) - shards)} are missing"
            self._load(engine, path, metadata)
        except CheckpointError as error:
            return str(error)
        return metadata

    def _load(self, engine: Engine, path: Path, metadata: dict[str, Any]) -> None:
        for key, value in self._compatible.items():
            found = metadata["compatible"].get(key)
            if found != value:
                raise CheckpointError(
                    f"{path} belongs to another run: {key} was {found}, now it is {value}; "
                    "use another name or folder, or --fresh to start over"
                )
        with opened(path, metadata) as (names, read):
            try:
                engine.load_state(read, names)
            except KeyError as error:
                raise CheckpointError(
                    f"{path} has no tensor {error} on this machine; all machines must see all shards "
                    "(put the run's folder on shared storage, or copy the shards)"
                ) from error
            except ValueError as error:
                raise CheckpointError(f"{path} belongs to another model: {error}") from error


def _steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True)


def find(path: Path) -> Path:
    """The newest intact checkpoint at `path`: itself one, or a run's folder. Raises CheckpointError."""
    if (path / _METADATA).exists():
        return path
    problems = []
    for folder in (path, path / "checkpoints"):
        for step in _steps(folder):
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
        metadata = json.loads((path / _METADATA).read_text())
        if metadata["format"] != _FORMAT:
            raise CheckpointError(f"{path}: format {metadata['format']} is not known to HorizonML {__version__}")
        metadata["shards"], metadata["compatible"], metadata["step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: {_METADATA} is missing or damaged ({error})") from error
    checked: dict[str, Any] = metadata
    return checked


def verify(path: Path, metadata: dict[str, Any], require_all: bool = True) -> list[str]:
    """The shards that are here and intact. Raises CheckpointError for a damaged one, or a missing one if required."""
    intact = []
    for name, shard in metadata["shards"].items():
        file = path / name
        if not file.exists() and not require_all:
            continue
        try:
            size = file.stat().st_size
            if size != shard["bytes"]:
                raise CheckpointError(f"{file} is damaged: it has {size} bytes instead of {shard['bytes']}")
            if _digest(file) != shard["sha256"]:
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


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
