"""Checkpoints: the state of a training at a step boundary, whole or not there at all.

Shards are written into a hidden folder, made durable and checked in; only then is the folder renamed, which is what
makes it a checkpoint (see `shards` for the files). Tensors carry the model's own names, so a checkpoint can be resumed
with any plan and any world size.

Ranks may share a file system, or each machine may have its own disk. On its own disk every machine keeps the shards of
its stages, and rank 0's keeps all of them; what a rank lacks when it resumes is sent to it by one that has it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import uuid
from pathlib import Path
from typing import IO, Any, Literal

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from horizonml import __version__
from horizonml.engine.engine import Engine
from horizonml.engine.group import Group
from horizonml.errors import CheckpointError
from horizonml.files import sync_folder, write_atomically
from horizonml.shards import FORMAT, METADATA, check, digest, opened, read_metadata, steps, verify

_log = logging.getLogger(__name__)
_TAG = (1 << 30) + 200
_CHUNK = 4 << 20


class Checkpoints:
    """The checkpoints of a run, as one rank of its group sees them."""

    def __init__(self, folder: Path, group: Group, hosts: list[str], keep: int, compatible: dict[str, Any]) -> None:
        """`hosts[r]` is where rank r runs. `compatible` is what a checkpoint must agree with to be resumed."""
        self._folder, self._group, self._keep, self._compatible = folder, group, keep, compatible
        self._leads = _leads(folder, group, hosts)
        self._is_lead = self._leads[group.rank] == group.rank
        if self._is_lead:
            for leftover in folder.glob(".step-*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def save(self, engine: Engine, step: int, details: dict[str, Any]) -> Path | None:
        """Write a checkpoint; all ranks call this after the same step.

        `details` go into the metadata. Returns its folder, or None if a rank could not write its shard: training can
        go on, and the checkpoints there were are kept.
        """
        started = time.perf_counter()
        target, hidden = self._folder / f"step-{step:08d}", self._folder / f".step-{step:08d}"
        members = engine.plan.stages[engine.stage_number].ranks
        lead = self._leads[self._group.rank]
        writer = next(rank for rank in members if self._leads[rank] == lead)
        tensors = engine.state()  # which members may have to put together
        name = f"stage-{engine.stage_number}.safetensors"
        report = self._write_shard(tensors, hidden, name) if writer == self._group.rank else {}
        gathered = self._group.gather_json([report, details if self._group.rank == 0 else None])
        reports, details = [report for report, _ in gathered], gathered[0][1]  # rank 0's, so that all say the same
        failed = {rank: report["error"] for rank, report in enumerate(reports) if "error" in report}
        shards: dict[str, dict[str, Any]] = {}
        for rank, report in enumerate(reports):
            if report and rank not in failed and shards.setdefault(report["file"], report) != report:
                failed[rank] = f"its {report['file']} differs from that of another member of the stage"
        if not failed:
            for file, shard in shards.items():
                writers = [rank for rank, report in enumerate(reports) if report.get("file") == file]
                if not any(self._leads[rank] == 0 for rank in writers):
                    self._copy(hidden / file, shard, writers[0], 0)
            metadata = {
                "format": FORMAT,
                "horizonml": __version__,
                "torch": torch.__version__,
                "step": step,
                **details,
                "compatible": self._compatible,
                "plan": engine.plan.to_json(),
                "shards": shards,
            }
            outcomes = self._group.gather_json(self._commit(hidden, target, metadata) if self._is_lead else None)
            failed = {rank: problem for rank, problem in enumerate(outcomes) if problem is not None}
        if failed:
            for rank, reason in failed.items():
                _log.warning("checkpoint of step %d not saved: rank %d: %s", step, rank, reason)
            shutil.rmtree(hidden, ignore_errors=True)
            return None
        if self._is_lead:
            for old in steps(self._folder)[self._keep :]:
                shutil.rmtree(old, ignore_errors=True)
        _log.debug("checkpoint of step %d took %.2f s", step, time.perf_counter() - started)
        return target

    def _write_shard(self, tensors: dict[str, Tensor], folder: Path, name: str) -> dict[str, Any]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())
            return {"file": name, "sha256": digest(folder / name), "bytes": (folder / name).stat().st_size}
        except (OSError, safetensors.SafetensorError) as error:
            return {"error": str(error)}

    def _commit(self, hidden: Path, target: Path, metadata: dict[str, Any]) -> str | None:
        """Make the hidden folder a checkpoint; the problem, if there is one."""
        try:
            hidden.mkdir(parents=True, exist_ok=True)
            verify(hidden, metadata, require_all=self._group.rank == 0, content=False)
            _write_metadata(hidden, metadata)
            if target.exists():
                shutil.rmtree(target)
            hidden.rename(target)
            sync_folder(self._folder)
        except (OSError, CheckpointError) as error:
            return str(error)
        return None

    def resume(self, engine: Engine) -> dict[str, Any] | None:
        """Load the newest intact checkpoint there is on any machine; returns its metadata, None if there is none.

        Damaged ones are passed over by name. Raises CheckpointError if all are damaged, or if the one to resume
        belongs to another model or data.
        """
        intact: dict[str, dict[str, str]] = {}
        problems: list[str] = []
        if self._is_lead:
            for path in steps(self._folder):
                try:
                    metadata = read_metadata(path)
                    names = verify(path, metadata, require_all=False)
                    intact[path.name] = {name: metadata["shards"][name]["sha256"] for name in names}
                except CheckpointError as error:
                    problems.append(str(error))
                    _log.warning("%s; trying the one before", error)
        seen = self._group.gather_json({"intact": intact, "problems": problems})
        problems = [problem for report in seen for problem in report["problems"]]
        for name in sorted({name for report in seen for name in report["intact"]}, reverse=True):
            found = self._group.gather_json(self._resume_from(engine, name, [report["intact"] for report in seen]))
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

    def _resume_from(self, engine: Engine, name: str, seen: list[dict[str, dict[str, str]]]) -> dict[str, Any] | str:
        """Load one checkpoint; its metadata, or what is wrong. `seen[r]` are the intact shards that rank r reported."""
        path = self._folder / name
        holder = next(rank for rank, intact in enumerate(seen) if name in intact)
        own, problem = None, None
        if name in seen[self._group.rank]:
            own = read_metadata(path)  # which was read a moment ago
        metadata = check(self._group.share_json(own, holder), path)
        where: dict[str, list[int]] = {
            file: [rank for rank, intact in enumerate(seen) if intact.get(name, {}).get(file) == shard["sha256"]]
            for file, shard in metadata["shards"].items()
        }
        lost = sorted(file for file, ranks in where.items() if not ranks)
        if lost:
            return f"{path}: shards {lost} are missing"
        try:
            if self._is_lead and own != metadata:
                path.mkdir(parents=True, exist_ok=True)
                _write_metadata(path, metadata)
        except OSError as error:
            problem = f"{path}: {error.strerror or error}"
        stage = engine.plan.stages[engine.stage_number]
        needed = [
            f"stage-{number}.safetensors"
            for number, saved in enumerate(metadata["plan"]["stages"])
            if saved["start"] < stage.stop and stage.start < saved["stop"]
        ]
        for rank, files in enumerate(self._group.gather_json(needed)):
            for file in files:
                lead = self._leads[rank]
                if lead not in where[file]:
                    self._copy(path / file, metadata["shards"][file], where[file][0], lead)
                    where[file].append(lead)
        self._group.gather_json(None)  # ranks that share a disk with a lead read what it has received
        if problem is not None:
            return problem
        try:
            self._load(engine, path, {**metadata, "shards": {file: metadata["shards"][file] for file in needed}})
        except CheckpointError as error:
            return str(error)
        return metadata

    def _copy(self, path: Path, shard: dict[str, Any], source: int, target: int) -> None:
        """Send a shard's file from one rank to another, where it is checked when it is used."""
        if self._group.rank not in (source, target):
            return
        left = int(shard["bytes"])
        sending = self._group.rank == source
        with _open_or_warn(path, "rb" if sending else "wb") as file:
            while left > 0:
                chunk = torch.zeros(min(left, _CHUNK), dtype=torch.uint8)
                if sending:
                    content = file.read(len(chunk))
                    chunk[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else 0
                    self._group.wait(self._group.send(chunk, target, _TAG), target)
                else:
                    self._group.wait(self._group.receive(chunk, source, _TAG), source)
                    try:
                        file.write(chunk.numpy().data)
                    except OSError as error:
                        _log.warning("%s: %s", path, error.strerror or error)
                left -= len(chunk)

    def _load(self, engine: Engine, path: Path, metadata: dict[str, Any]) -> None:
        for key, value in self._compatible.items():
            found = metadata["compatible"].get(key)
            if found != value:
                raise CheckpointError(
                    f"{path} belongs to another run: {key} was {found}, now it is {value}; "
                    "use another name or folder, or --fresh to start over"
                )
        verify(path, metadata)
        with opened(path, metadata) as (names, read):
            try:
                engine.load_state(read, names)
            except KeyError as error:
                raise CheckpointError(f"{path} has no tensor {error} on this machine") from error
            except ValueError as error:
                raise CheckpointError(f"{path} belongs to another model: {error}") from error


def _leads(folder: Path, group: Group, hosts: list[str]) -> list[int]:
    """For each rank, the first rank that works on the same files: its machine's first, or rank 0 if they are shared."""
    if len(set(hosts)) == 1:
        return [0] * len(hosts)
    probe = folder / group.share_json(f".probe-{uuid.uuid4()}")
    if group.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
        except OSError as error:
            _log.warning("cannot write checkpoints to %s: %s", folder, error.strerror or error)
    group.gather_json(None)
    shared = group.gather_json(probe.exists())
    if group.rank == 0:
        probe.unlink(missing_ok=True)
    return [0 if shared[rank] else hosts.index(host) for rank, host in enumerate(hosts)]


def _open_or_warn(path: Path, mode: Literal["rb", "wb"]) -> IO[bytes]:
    """The file; or, if that fails, nothing that can be read or written: the other rank waits for so many bytes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open(mode)
    except OSError as error:
        _log.warning("%s: %s", path, error.strerror or error)
        return Path(os.devnull).open(mode)


def _write_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    write_atomically(folder / METADATA, (json.dumps(metadata, indent=2) + "\n").encode())
