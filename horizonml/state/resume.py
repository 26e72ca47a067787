"""Decides what training goes on with: the state in the ranks' memory, or a checkpoint.

A checkpoint is the newest that is intact on all machines together. When a rank lacks a shard, a rank that has it sends
it. Every file is read and hashed once, by one rank of the disk that it lies on or arrives at.

Of the states in memory, after a group has lost or gained ranks, the newest step that any rank has reached counts,
because all ranks had done their part of it. A rank that misses only the others' consent applies the gradients that it
still holds; one that misses more drops its state, and receives that of a rank which has it. What no rank has may be
rebuilt from a replica (`mirror`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from horizonml.comm.expected import anything, boolean, instance, items, optional, plain
from horizonml.comm.group import Group
from horizonml.errors import CheckpointError
from horizonml.plan.plan import Plan
from horizonml.state.disks import Disks, FileCopy
from horizonml.state.optim import PreparedOuter
from horizonml.state.runfolder import Term
from horizonml.state.shards import (
    Best,
    Metadata,
    check,
    inner_name,
    intact,
    is_folder_name,
    opened,
    read_inner,
    read_metadata,
    shard_name,
    step_of,
    steps,
    verify_shard,
    write_metadata,
)
from horizonml.state.train_state import TrainState

_log = logging.getLogger(__name__)
_FIRST = Term(0, 0)
_TIMES = 4  # another optimizer than the job's may have written a checkpoint, and keep more


class ShardsAway(CheckpointError):
    """Reports that no checkpoint can be resumed until machines are back that are not in the group."""

    def __init__(self, message: str, machines: Sequence[str]) -> None:
        super().__init__(message)
        self.machines = machines


class _Foreign(CheckpointError):
    """Reports that a checkpoint belongs to another run, as older ones there will."""


@dataclass(frozen=True)
class _Problem:
    """Tells other ranks why a checkpoint cannot be resumed."""

    text: str
    final: bool  # whether an older one could not be resumed either
    away: tuple[str, ...]  # the machines that keep what is missing and are not in the group

    @classmethod
    def of(cls, error: CheckpointError) -> _Problem:
        """Describe an error."""
        away = error.machines if isinstance(error, ShardsAway) else ()
        return cls(str(error), isinstance(error, _Foreign), tuple(away))


@dataclass(frozen=True)
class _Seen:
    """Describes what a rank's disk has of a checkpoint."""

    version: str = ""  # empty if the checkpoint is not there
    term: Term = _FIRST  # of the group that saved it
    shards: dict[str, str] = field(default_factory=dict)  # the intact ones, and their SHA-256
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resumption:
    """Loads checkpoints from a folder, as one rank of a group."""

    folder: Path
    group: Group
    disks: Disks
    compatible: Mapping[str, Any]  # what a checkpoint must agree with
    places: Sequence[str]  # where the ranks' machines are, as shards name them

    def resume(self, state: TrainState, plan: Plan) -> Metadata | None:
        """Load the newest checkpoint that is intact; see `Checkpoints.resume`."""
        problems: list[str] = []
        away: list[str] = []
        for name in self._names():
            seen = self.group.exchange(self._look_at(name))
            damaged = [problem for there in seen for problem in there.problems]
            for problem in damaged:
                _log.warning("%s; a copy, or the checkpoint before, is used instead", problem)
            for having in _versions(seen):
                metadata = own = None
                try:
                    metadata = self._resume_from(state, plan, name, having)
                except CheckpointError as error:
                    own = plain(_Problem.of(error))
                everyone = self.group.gather_json(own, optional(instance(_Problem)))
                refused = next((one for one in everyone if one is not None), None)
                if refused is None:
                    assert metadata is not None
                    self._take_inner(state, plan, self.folder / name, metadata)
                    return metadata
                if refused.final:
                    raise CheckpointError(refused.text)
                damaged.append(refused.text)
                away += refused.away
                _log.warning("%s; trying the one before", refused.text)
            problems += damaged
        if problems:
            message = "no checkpoint can be resumed (--fresh, or fresh=True in Python, starts over): "
            message += "; ".join(problems)
            raise ShardsAway(message, list(dict.fromkeys(away))) if away else CheckpointError(message)
        return None

    def newer_than(self, step: int) -> int | None:
        """Return the step of the newest checkpoint after `step` that could be resumed, or None if there is none.

        All ranks call this and return the same. Shards are read only of checkpoints after `step`.
        """
        for name in self._names():
            if step_of(Path(name)) <= step:
                return None
            for having in _versions(self.group.exchange(self._look_at(name))):
                with suppress(CheckpointError):
                    metadata, _ = self._locate(self.folder / name, having)
                    return metadata.step
        return None

    def _names(self) -> list[str]:
        """Return the checkpoints on all disks, the newest first."""
        found = self.group.gather_json(
            [path.name for path in steps(self.folder)] if self.disks.is_lead else [], items(anything)
        )
        names = {name for there in found for name in there if is_folder_name(name)}
        return sorted(names, key=lambda name: step_of(Path(name)), reverse=True)

    def _look_at(self, name: str) -> _Seen:
        """Return which version of a checkpoint is on this rank's disk, and which of its shards are intact."""
        path = self.folder / name
        if not self.disks.is_lead or not path.is_dir():
            return _Seen()
        try:
            metadata = read_metadata(path)
        except CheckpointError as error:
            return _Seen(problems=(str(error),))
        names, problems = intact(path, metadata)
        shards = {name: metadata.shards[name].sha256 for name in names}
        return _Seen(_version(metadata), Term(metadata.restarts, metadata.generation), shards, tuple(problems))

    def _resume_from(self, state: TrainState, plan: Plan, name: str, seen: list[_Seen]) -> Metadata:
        """Load one checkpoint; `seen[r]` is what rank r has of it. Raises CheckpointError, unless it loads on all."""
        path, rank = self.folder / name, self.group.rank
        metadata, where = self._locate(path, seen)
        for number, saved in enumerate(metadata.plan.stages):
            name = shard_name(number)
            check_shard(state, f"{path / name}", saved.start, saved.stop, metadata.shards[name].bytes)
        self._complete(path, metadata, plan, where, not seen[rank].version)
        spans = [(plan.stages[number].start, plan.stages[number].stop) for number in plan.stages_of(rank)]
        files = list(dict.fromkeys(file for start, stop in spans for file in metadata.needed(start, stop)))
        with opened(path, {file: metadata.shards[file] for file in files}) as (names, read):
            try:
                state.load(read, names)
            except KeyError as error:
                raise CheckpointError(f"{path} has no tensor {error}") from error
            except ValueError as error:
                raise _Foreign(f"{path} belongs to another model: {error}") from error
        return metadata

    def _take_inner(self, state: TrainState, plan: Plan, path: Path, metadata: Metadata) -> None:
        """Load the optimizer's state as a member that took local steps had it; all ranks call this.

        Each member takes its own up, or else the first member's. Where members do not take local steps now, all need
        the same, so they take the first member's if all of them can read it.
        """
        if not metadata.inner:
            return
        found: dict[str, Tensor] = {}
        complete = True
        for number in plan.stages_of(self.group.rank):
            stage = plan.stages[number]
            places = [stage.ranks.index(self.group.rank), 0] if plan.local is not None else [0]
            for saved, span in enumerate(metadata.plan.stages):
                if span.start < stage.stop and stage.start < span.stop:
                    read = (read_inner(path, metadata, inner_name(place, saved)) for place in places)
                    one = next((tensors for tensors in read if tensors is not None), None)
                    complete = complete and one is not None
                    found |= one or {}
        every = self.group.gather_json(complete, boolean)
        if plan.local is not None or all(every):
            try:
                state.load_inner(found)
            except ValueError as error:
                _log.warning("%s: %s; the optimizer begins anew", path, error)

    def _locate(self, path: Path, seen: list[_Seen]) -> tuple[Metadata, dict[str, list[int]]]:
        """Return what one checkpoint consists of, and the ranks whose disks have each of its shards.

        `seen[r]` is what rank r has of it. Raises CheckpointError on all ranks if it cannot be resumed.
        """
        holder = next(rank for rank, there in enumerate(seen) if there.version)
        own = read_metadata(path).model_dump() if seen[self.group.rank].version else None  # as a moment ago
        metadata = check(self.group.broadcast(own, holder), path)
        where = {
            file: [rank for rank, there in enumerate(seen) if there.shards.get(file) == shard.sha256]
            for file, shard in metadata.shards.items()
        }
        lost = sorted(file for file, ranks in where.items() if not ranks)
        if lost:
            kept = sorted({machine for file in lost for machine in metadata.shards[file].machines})
            where_kept = f" (kept by {', '.join(kept)})" if kept else ""
            words = f"{path}: {', '.join(lost)} {'is' if len(lost) == 1 else 'are'} missing{where_kept}"
            raise ShardsAway(words, [machine for machine in kept if machine not in self.places])
        for key, value in self.compatible.items():
            if metadata.compatible.get(key) != value:
                raise _Foreign(
                    f"{path} belongs to another run: {key} was {metadata.compatible.get(key)}, now it is {value}; use "
                    "another name or folder, or start over (--fresh, or fresh=True in Python)"
                )
        return metadata, where

    def _complete(self, path: Path, metadata: Metadata, plan: Plan, where: dict[str, list[int]], new: bool) -> None:
        """Bring the shards that ranks need to their disks. Raises CheckpointError on all ranks if that fails on any.

        `where` names the ranks whose disks have each shard; `new` says that this rank's disk has no metadata yet.
        """
        copies: list[FileCopy] = []
        for stage in plan.stages:
            for lead in dict.fromkeys(self.disks.leads[rank] for rank in stage.ranks):
                for file in metadata.needed(stage.start, stage.stop):
                    if lead not in where[file]:
                        copies.append(FileCopy(path / file, metadata.shards[file].bytes, where[file][0], lead))
                        where[file].append(lead)
        failed = self.disks.copy(copies, self.group)

        def finish() -> None:
            for copy in copies:
                if copy.target == self.group.rank:  # the others were verified when the ranks looked at them
                    verify_shard(copy.path, metadata.shards[copy.path.name])
            if new:
                write_metadata(path, metadata.model_dump())

        # Ranks that share a disk with its lead read what the lead has received, so they wait for it here.
        problems = failed + self.disks.everywhere(finish, self.group)
        if problems:
            raise CheckpointError(problems[0])


def check_shard(state: TrainState, name: str, start: int, stop: int, announced: int) -> None:
    """Raise CheckpointError if a shard of layers `start` to `stop - 1` is said to be larger than it can be."""
    most = _TIMES * state.most_bytes(range(start, min(stop, len(state.model.chain))))
    if announced > most:
        raise CheckpointError(
            f"{name} is said to have {announced:,} bytes, but the state of layers {start} to {stop - 1} has at most "
            f"{most:,}; the checkpoint belongs to another model, or its metadata is false"
        )


def _versions(seen: list[_Seen]) -> list[list[_Seen]]:
    """Return what ranks have of each version of a checkpoint: two groups may have saved the same step.

    Each version is complete only by itself. The newer group's comes first.
    """
    versions = sorted((there for there in seen if there.version), key=lambda there: there.term, reverse=True)
    return [
        [there if there.version == version else _Seen() for there in seen]
        for version in dict.fromkeys(there.version for there in versions)
    ]


def _version(metadata: Metadata) -> str:
    """Return a value that differs between two checkpoints of the same step."""
    return hashlib.sha256(json.dumps(metadata.model_dump(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Held:
    """Describes the state that a rank has in memory."""

    step: int
    next: int | None  # a step after which it can be made the state with what is prepared, too
    layers: tuple[int, ...]

    @classmethod
    def of(cls, state: TrainState) -> Held:
        """Describe a state."""
        return cls(state.step, state.next, tuple(state.layers()))

    def reaches(self, step: int) -> bool:
        """Return whether this is the state after `step`, or can be made so."""
        return step in (self.step, self.next)


@dataclass(frozen=True)
class Recovery:
    """Tells which step training goes on from, and which ranks hold each layer as it is after that step."""

    step: int
    holders: list[list[int]]

    @property
    def missing(self) -> list[int]:
        """Return the layers that no rank holds."""
        return [layer for layer, ranks in enumerate(self.holders) if not ranks]


def newest(reports: Sequence[Held | None], stateful: Sequence[bool]) -> Recovery | None:
    """Return where to go on from, or None if no rank has a state.

    `reports[r]` is the state of rank r, None if it has none. `stateful[l]` says whether layer l has any parameters or
    buffers that only its holders have; layers without any are held by all.
    """
    steps = [report.step for report in reports if report is not None]
    if not steps:
        return None
    step = max(steps)
    everyone = list(range(len(reports)))
    able = [(rank, report) for rank, report in enumerate(reports) if report is not None and report.reaches(step)]
    holders = [[rank for rank, report in able if layer in report.layers] for layer in range(len(stateful))]
    return Recovery(step, [there if has else everyone for there, has in zip(holders, stateful, strict=True)])


@dataclass(frozen=True)
class Memory:
    """What a rank says of the state in its memory."""

    held: Held | None = None  # None if there is none that has been trained
    scale: float | None = None  # the factor by which the last step's gradients were multiplied
    metrics: dict[str, object] = field(default_factory=dict)
    best: dict[str, Best] = field(default_factory=dict)

    @classmethod
    def of(cls, state: TrainState, begun: bool) -> Memory:
        """Describe a state, which is dropped if it is not valid; `begun` says whether it has been trained."""
        if not state.valid:
            state.drop()
        held = Held.of(state) if begun and state.valid else None
        return cls(held, state.scales.get(state.step - 1), state.metrics, state.best)


def agree_on_state(state: TrainState, memories: Sequence[Memory]) -> Recovery | None:
    """Return where all ranks go on from, given what each has in memory, or None if none of them has begun.

    The state of this rank is brought to the step that training goes on from, or dropped if it cannot be.
    """
    reports = [memory.held for memory in memories]
    stateful = state.stateful()
    found = newest(reports, [layer in stateful for layer in range(len(state.model.chain))])
    if found is None:
        return None
    able = [memory for memory in memories if memory.held is not None and memory.held.reaches(found.step)]
    # How the newest step's gradients were clipped is known to those who have applied them.
    there = (one.scale for one in able if one.held is not None and one.held.step == found.step)
    _adopt(state, found.step, next((scale for scale in there if scale is not None), None))
    state.metrics, state.best = dict(able[0].metrics), dict(able[0].best)
    return found


def _adopt(state: TrainState, step: int, scale: float | None) -> None:
    """Bring a state in memory to a step that other ranks have reached, or drop it if that is not possible.

    `scale` is the factor by which the gradients of the step before were multiplied, None if nobody knows one.
    """
    clips = state.optimizer.spec.clip_norm is not None
    if state.step == step:
        state.settle(apply=False)
    elif state.next == step and (isinstance(state.prepared, PreparedOuter) or scale is not None or not clips):
        state.settle(apply=True, scale=scale if clips else None)
    else:
        state.drop()
