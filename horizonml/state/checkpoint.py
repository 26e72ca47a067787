"""Saves and resumes checkpoints: the state of a training at a step boundary, complete or not there at all.

Shards are written into a hidden folder, made durable and verified; only then is the folder renamed, which makes it a
checkpoint (see `shards` for the files). Tensors carry the model's own names, so a checkpoint can be resumed with any
plan and any world size.

Where machines have their own disks, `disks` decides which of them keep a copy of a shard. When a rank that resumes
lacks a shard, a rank that has it sends it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from horizonml import __version__
from horizonml.comm.group import Group
from horizonml.errors import CheckpointError
from horizonml.files import sync_folder, write_atomically
from horizonml.plan.plan import Plan
from horizonml.state.disks import Copy, Disks
from horizonml.state.equal import share_state
from horizonml.state.shards import (
    FORMAT,
    METADATA,
    Metadata,
    Shard,
    check,
    describe,
    folder_name,
    intact,
    is_folder_name,
    opened,
    read_metadata,
    shard_name,
    step_of,
    steps,
    verify_shard,
)
from horizonml.state.train_state import TrainState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Problem:
    """Describes why a checkpoint cannot be resumed; `final` if an older one could not be resumed either."""

    text: str
    final: bool = False


@dataclass(frozen=True)
class _Seen:
    """Describes what a rank's disk has of a checkpoint."""

    version: str = ""  # empty if the checkpoint is not there
    shards: dict[str, str] = field(default_factory=dict)  # the intact ones, and their SHA-256
    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, report: dict[str, Any]) -> _Seen:
        """Return what a peer reports; the report is not trusted to have the right types."""
        shards = {str(name): str(digest) for name, digest in report.get("shards", {}).items()}
        return cls(str(report.get("version", "")), shards, tuple(map(str, report.get("problems", []))))


class Checkpoints:
    """Saves and resumes the checkpoints of a run, as one rank of its group."""

    def __init__(
        self, folder: Path, group: Group, keep: int, compatible: dict[str, Any], names: list[str] | None = None
    ) -> None:
        """Prepare the folder; all ranks of the group call this.

        A checkpoint can be resumed only if it agrees with `compatible`. `names[r]` is the name of rank r's machine.
        """
        self._folder, self._group, self._keep, self._compatible = folder, group, keep, compatible
        self._names = names or [f"rank {rank}" for rank in range(group.world_size)]
        self._disks = Disks(folder, group)
        self.newest: int | None = None  # the step of the checkpoint that was saved or resumed last
        self._drift_told = False
        if self._disks.is_lead:
            for leftover in [*folder.glob(".step-*"), *folder.glob(".old-*")]:
                shutil.rmtree(leftover, ignore_errors=True)

    def save(self, state: TrainState, plan: Plan, details: dict[str, Any]) -> list[str]:
        """Write a checkpoint of the state; all ranks call this after the same step.

        `details` go into the metadata. Return what went wrong, and on which rank; the list is empty if the checkpoint
        is saved. If it is not, training can go on, and the existing checkpoints are kept.
        """
        # A group that was thought dead may wake up and reach this very step, so each folder has a name of its own.
        step = state.step
        hidden = self._folder / f".{folder_name(step)}-{self._disks.word[:8]}"
        self._equalise(state, plan)
        writers = [self._disks.writers(stage.ranks) for stage in plan.stages]
        written = {}
        for number in plan.stages_of(self._group.rank):
            stage = plan.stages[number]
            tensors = state.whole(self._group, stage.start, stage.stop)  # all members have to put them together
            if self._group.rank in writers[number].values():
                written[shard_name(number)] = self._write_shard(tensors, hidden, shard_name(number))
        gathered = self._group.gather_json([written, details if self._group.rank == 0 else None])
        reports, details = [report for report, _ in gathered], gathered[0][1]  # rank 0's, so that all metadata agree
        shards, failed = _agreed(writers, reports)
        if not failed:
            shards, received = self._copy(hidden, plan, shards)
            metadata = {
                "format": FORMAT,
                "horizonml": __version__,
                "torch": torch.__version__,
                "step": step,
                **details,
                "compatible": self._compatible,
                "plan": plan.to_json(),
                "shards": {name: shard.model_dump() for name, shard in shards.items()},
            }
            failed = self._everywhere(lambda: self._prepare(hidden, metadata, shards, received))
        if not failed:
            failed = self._everywhere(lambda: self._commit(hidden, self._folder / folder_name(step)))
        if failed:
            for problem in failed:
                _log.warning("the checkpoint of step %d was not saved: %s", step, problem)
            shutil.rmtree(hidden, ignore_errors=True)
            return failed
        self.newest = step
        if self._disks.is_lead:
            for old in [path for path in steps(self._folder) if step_of(path) <= step][self._keep :]:
                shutil.rmtree(old, ignore_errors=True)
        return []

    def _equalise(self, state: TrainState, plan: Plan) -> None:
        """Make the members of a stage hold the same state again: processors that round differently drift apart."""
        drifted = share_state(state, plan, self._group)
        if drifted and not self._drift_told:
            ranks = ", ".join(str(rank) for rank, _ in drifted)
            _log.warning(
                "rank %s rounds differently from the first member of its stage, and takes over that member's state at "
                "every checkpoint",
                ranks,
            )
            self._drift_told = True

    def _write_shard(self, tensors: dict[str, Tensor], folder: Path, name: str) -> dict[str, Any]:
        for key, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                return {"error": f"{key} has values that are not finite"}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())
            return describe(folder / name, len(tensors)).model_dump()
        except (OSError, safetensors.SafetensorError) as error:
            return {"error": str(error)}

    def _copy(self, hidden: Path, plan: Plan, shards: dict[str, Shard]) -> tuple[dict[str, Shard], list[str]]:
        """Bring every shard to the disks that keep it.

        Return the shards with the names of these machines, and the names of the shards that this rank's disk received.
        """
        kept: dict[str, Shard] = {}
        copies: list[Copy] = []
        for number, stage in enumerate(plan.stages):
            name, writers = shard_name(number), self._disks.writers(stage.ranks)
            keepers = self._disks.keepers(stage.ranks)
            for disk in keepers:
                if disk not in writers:
                    copies.append(Copy(hidden / name, shards[name].bytes, writers[max(writers)], disk))
            machines = list(dict.fromkeys(self._names[disk] for disk in keepers))
            kept[name] = shards[name].model_copy(update={"machines": machines})
        self._disks.copy(copies)
        return kept, [copy.path.name for copy in copies if copy.target == self._group.rank]

    def _prepare(self, hidden: Path, metadata: dict[str, Any], shards: dict[str, Shard], received: list[str]) -> None:
        hidden.mkdir(parents=True, exist_ok=True)
        for name, shard in shards.items():
            if (hidden / name).exists():
                verify_shard(hidden / name, shard, content=name in received)
        _write_metadata(hidden, metadata)

    def _commit(self, hidden: Path, target: Path) -> None:
        """Make the hidden folder a checkpoint. Raises OSError before anything changes if the folder is gone."""
        old = hidden.with_name(f".old-{target.name}")
        hidden.stat()
        if target.exists():
            target.rename(old)
        hidden.rename(target)
        sync_folder(self._folder)
        shutil.rmtree(old, ignore_errors=True)

    def _everywhere(self, action: Callable[[], None]) -> list[str]:
        """Run `action` on every disk; return what went wrong, in the order of ranks, on all ranks."""
        problem = None
        if self._disks.is_lead:
            try:
                action()
            except (OSError, CheckpointError) as error:
                problem = str(error)
        found = self._group.gather_json(problem)
        return [f"rank {rank}: {problem}" for rank, problem in enumerate(found) if problem is not None]

    def set_aside(self) -> None:
        """Move the checkpoints of an earlier run out of the way; all ranks call this.

        They are kept as `checkpoints.previous`. Raises CheckpointError.
        """

        def move() -> None:
            if steps(self._folder):
                previous = self._folder.with_name(self._folder.name + ".previous")
                shutil.rmtree(previous, ignore_errors=True)
                self._folder.rename(previous)

        problems = self._everywhere(move)
        if problems:
            raise CheckpointError(f"the checkpoints of an earlier run cannot be moved: {'; '.join(problems)}")

    def resume(self, state: TrainState, plan: Plan) -> Metadata | None:
        """Load the newest checkpoint that is intact on all machines together; return None if there is none.

        `state` must hold the layers that this rank has in the plan. Damaged checkpoints are skipped, and a message
        names them. Raises CheckpointError if all are damaged, or if the one to resume belongs to another model or other
        data.
        """
        found = self._group.gather_json([path.name for path in steps(self._folder)] if self._disks.is_lead else [])
        names = {name for there in found for name in there if is_folder_name(name)}
        problems: list[str] = []
        for name in sorted(names, key=lambda name: step_of(Path(name)), reverse=True):
            seen = [_Seen.of(report) for report in self._group.gather_json(self._look_at(name))]
            damaged = [problem for there in seen for problem in there.problems]
            for problem in damaged:
                _log.warning("%s; a copy, or the checkpoint before, is used instead", problem)
            # Two groups may have saved the same step; each version is complete only by itself.
            for version in dict.fromkeys(there.version for there in seen if there.version):
                having = [there if there.version == version else _Seen() for there in seen]
                outcome = self._resume_from(state, plan, name, having)
                refused = self._first_problem(outcome)
                if refused is None:
                    assert isinstance(outcome, Metadata)
                    self.newest = state.step = outcome.step
                    state.metrics = dict(outcome.metrics)
                    return outcome
                if refused.final:
                    raise CheckpointError(refused.text)
                damaged.append(refused.text)
                _log.warning("%s; trying the one before", refused.text)
            problems += damaged
        if problems:
            raise CheckpointError("no checkpoint can be resumed (--fresh starts over): " + "; ".join(problems))
        return None

    def _look_at(self, name: str) -> dict[str, Any]:
        """Return which version of a checkpoint is on this rank's disk, and which of its shards are intact."""
        path = self._folder / name
        if not self._disks.is_lead or not path.is_dir():
            return {}
        try:
            metadata = read_metadata(path)
        except CheckpointError as error:
            return {"problems": [str(error)]}
        names, problems = intact(path, metadata)
        shards = {name: metadata.shards[name].sha256 for name in names}
        return {"version": _version(metadata), "shards": shards, "problems": problems}

    def _first_problem(self, outcome: Metadata | _Problem) -> _Problem | None:
        """Return the first problem that any rank has; all ranks call this and return the same."""
        for value in self._group.gather_json(vars(outcome) if isinstance(outcome, _Problem) else None):
            if value is not None:
                return _Problem(str(value["text"]), value["final"] is True)
        return None

    def _resume_from(self, state: TrainState, plan: Plan, name: str, seen: list[_Seen]) -> Metadata | _Problem:
        """Load one checkpoint; `seen[r]` is what rank r has of it."""
        path, rank = self._folder / name, self._group.rank
        holder = next(rank for rank, there in enumerate(seen) if there.version)
        own = read_metadata(path).model_dump() if seen[rank].version else None  # it was readable a moment ago
        try:
            metadata = check(self._group.broadcast(own, holder), path)
        except CheckpointError as error:
            return _Problem(str(error))
        where: dict[str, list[int]] = {
            file: [rank for rank, there in enumerate(seen) if there.shards.get(file) == shard.sha256]
            for file, shard in metadata.shards.items()
        }
        lost = sorted(file for file, ranks in where.items() if not ranks)
        if lost:
            kept = sorted({machine for file in lost for machine in metadata.shards[file].machines})
            where_kept = f" (kept by {', '.join(kept)})" if kept else ""
            return _Problem(f"{path}: {', '.join(lost)} {'is' if len(lost) == 1 else 'are'} missing{where_kept}")
        problem = None
        if self._disks.is_lead and own is None:
            try:
                path.mkdir(parents=True, exist_ok=True)
                _write_metadata(path, metadata.model_dump())
            except OSError as error:
                problem = f"{path}: {error.strerror or error}"
        copies: list[Copy] = []
        for stage in plan.stages:
            for lead in dict.fromkeys(self._disks.leads[rank] for rank in stage.ranks):
                for file in metadata.needed(stage.start, stage.stop):
                    if lead not in where[file]:
                        copies.append(Copy(path / file, metadata.shards[file].bytes, where[file][0], lead))
                        where[file].append(lead)
        self._disks.copy(copies)
        self._group.barrier()  # ranks that share a disk with its lead read what the lead has received
        if problem is not None:
            return _Problem(problem)
        for key, value in self._compatible.items():
            saved = metadata.compatible.get(key)
            if saved != value:
                return _Problem(
                    f"{path} belongs to another run: {key} was {saved}, now it is {value}; "
                    "use another name or folder, or --fresh to start over",
                    final=True,
                )
        received = [copy.path.name for copy in copies if copy.target == self._disks.leads[rank]]
        spans = [(plan.stages[number].start, plan.stages[number].stop) for number in plan.stages_of(rank)]
        files = list(dict.fromkeys(file for start, stop in spans for file in metadata.needed(start, stop)))
        return self._load(state, path, metadata, files, received)

    def _load(
        self, state: TrainState, path: Path, metadata: Metadata, files: list[str], received: list[str]
    ) -> Metadata | _Problem:
        try:
            for file in files:
                if file in received:  # the others were verified when the ranks looked at them
                    verify_shard(path / file, metadata.shards[file])
            with opened(path, {file: metadata.shards[file] for file in files}) as (names, read):
                state.load(read, names)
        except CheckpointError as error:
            return _Problem(str(error))
        except KeyError as error:
            return _Problem(f"{path} has no tensor {error}")
        except ValueError as error:
            return _Problem(f"{path} belongs to another model: {error}", final=True)
        return metadata


def _version(metadata: Metadata) -> str:
    """Return a value that differs between two checkpoints of the same step."""
    return hashlib.sha256(json.dumps(metadata.model_dump(), sort_keys=True).encode()).hexdigest()


def _agreed(writers: list[dict[int, int]], reports: list[Any]) -> tuple[dict[str, Shard], list[str]]:
    """Return the shards that were written, and what went wrong; the reports come from other machines."""
    shards: dict[str, Shard] = {}
    failed: list[str] = []
    for number, ranks in enumerate(writers):
        name = shard_name(number)
        for rank in sorted(ranks.values()):
            report = reports[rank].get(name) if isinstance(reports[rank], dict) else None
            if isinstance(report, dict) and "error" in report:
                failed.append(f"rank {rank}: {report['error']}")
                continue
            try:
                shard = Shard.model_validate(report)
            except ValidationError:
                failed.append(f"rank {rank}: it does not say what it wrote")
                continue
            if shards.setdefault(name, shard) != shard:
                failed.append(f"rank {rank}: its {name} differs from that of another member of the stage")
    return shards, failed


def _write_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    write_atomically(folder / METADATA, (json.dumps(metadata, indent=2) + "\n").encode())
