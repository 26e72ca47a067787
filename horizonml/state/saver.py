"""Writes snapshots as checkpoints, together with the other ranks of a group.

Shards are written into a hidden folder, made durable and verified; only then is the folder renamed, which makes it a
checkpoint (see `shards` for the files).

A `Background` does that in a thread beside the training. The newest checkpoints and the best one are kept.
"""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import safetensors
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from horizonml import __version__
from horizonml.comm.expected import anything, fields, optional
from horizonml.comm.group import Group
from horizonml.errors import CheckpointError, PeerLost
from horizonml.files import sync_folder
from horizonml.state.disks import Disks, FileCopy, Snapshot, not_finite
from horizonml.state.runfolder import Fence
from horizonml.state.shards import (
    FORMAT,
    KEPT,
    METADATA,
    Metadata,
    Shard,
    describe,
    find,
    folder_name,
    inner_name,
    read_metadata,
    shard_name,
    step_of,
    steps,
    verify,
    verify_shard,
    write_metadata,
)


@dataclass(frozen=True)
class Saver:
    """Writes checkpoints into a folder, as one rank of a group."""

    folder: Path
    group: Group
    disks: Disks
    fence: Fence
    keep: int  # how many checkpoints
    compatible: dict[str, object]  # what a checkpoint must agree with to be resumed
    machines: Sequence[str]  # for each rank, the name of its machine for people

    def save(self, snapshot: Snapshot) -> list[str]:
        """Write a checkpoint; all ranks of the group call this with their snapshots of the same step.

        Return what went wrong, and on which rank; the list is empty if the checkpoint is saved. If it is not, existing
        checkpoints are kept. Raises PeerLost.
        """
        # A group that was thought dead may wake up and reach this very step, so each folder has a name of its own.
        word = f"g{self.fence.term.generation}-{self.disks.word[:8]}"
        hidden = self.folder / f".{folder_name(snapshot.step)}-{word}"
        saved = False
        try:
            problems = self._save(snapshot, hidden)
            saved = not problems
        finally:
            # Another rank on this disk must not, for the lead may be about to rename the folder.
            if not saved and self.disks.is_lead:
                shutil.rmtree(hidden, ignore_errors=True)
        if saved and self.disks.is_lead:
            keeps_best = KEPT in snapshot.details.get("best", {})
            for old in superfluous(self.folder, snapshot.step, self.keep, keeps_best):
                shutil.rmtree(old, ignore_errors=True)
        return problems

    def _save(self, snapshot: Snapshot, hidden: Path) -> list[str]:
        plan = snapshot.plan
        written = {}
        for number, tensors in snapshot.tensors.items():
            written[shard_name(number)] = self._write_shard(tensors, hidden, shard_name(number))
        for name, tensors in snapshot.inner.items():
            written[name] = self._write_shard(tensors, hidden, name)
        own = [written, snapshot.details if self.group.rank == 0 else None]
        gathered = self.group.gather_json(own, fields(anything, optional(dict)))
        reports = [report for report, _ in gathered]
        details = gathered[0][1] or {}  # rank 0's, so that all metadata agree
        expected, of_members = {}, {}
        for number, stage in enumerate(plan.stages):
            writers = sorted(self.disks.writers(stage.ranks).values())
            expected[shard_name(number)] = writers, snapshot.most[number]
            for member, rank in enumerate(stage.ranks if plan.local is not None else ()):
                of_members[inner_name(member, number)] = [rank], snapshot.most[number]
        shards, failed = _agreed(expected, reports)
        inner, more = _agreed(of_members, reports)
        if failed or more:
            return failed + more
        shards, received, failed = self._copy(snapshot, hidden, shards)
        if failed:
            return failed
        metadata = {
            "format": FORMAT,
            "horizonml": __version__,
            "torch": torch.__version__,
            "step": snapshot.step,
            **vars(self.fence.term),
            **details,
            "compatible": self.compatible,
            "plan": plan.to_json(),
            "shards": {name: shard.model_dump() for name, shard in shards.items()},
            **({"inner": {name: shard.model_dump() for name, shard in inner.items()}} if inner else {}),
        }
        failed = self.disks.everywhere(lambda: self._prepare(hidden, metadata, shards, received), self.group)
        target = self.folder / folder_name(snapshot.step)
        return failed or self.disks.everywhere(lambda: self._commit(hidden, target), self.group)

    def _write_shard(self, tensors: Mapping[str, Tensor], folder: Path, name: str) -> dict[str, object]:
        """Write a shard and make it durable; return its metadata, or what went wrong as an `error`."""
        bad = not_finite(tensors)
        if bad is not None:
            return {"error": f"{bad} has values that are not finite"}
        try:
            self.fence.check()
            folder.mkdir(parents=True, exist_ok=True)
            save_file(dict(tensors), folder / name)
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())
            return describe(folder / name, len(tensors)).model_dump()
        except (OSError, CheckpointError, safetensors.SafetensorError) as error:
            return {"error": str(error)}

    def _copy(
        self, snapshot: Snapshot, hidden: Path, shards: Mapping[str, Shard]
    ) -> tuple[dict[str, Shard], list[str], list[str]]:
        """Bring every shard to the disks that keep it.

        Return the shards with these machines, the names of those that this rank's disk received, and what went wrong.
        """
        kept: dict[str, Shard] = {}
        copies: list[FileCopy] = []
        for number, stage in enumerate(snapshot.plan.stages):
            name, writers = shard_name(number), self.disks.writers(stage.ranks)
            keepers = self.disks.keepers(stage.ranks)
            for disk in keepers:
                if disk not in writers:
                    copies.append(FileCopy(hidden / name, shards[name].bytes, writers[max(writers)], disk))
            # Two machines may have the same name, and are two; a machine may have several disks, and is one.
            places = {self.group.hosts[disk]: self.machines[disk] for disk in keepers}
            kept[name] = shards[name].model_copy(update={"machines": list(places.values())})
        failed = self.disks.copy(copies, self.group)
        return kept, [copy.path.name for copy in copies if copy.target == self.group.rank], failed

    def _prepare(
        self, hidden: Path, metadata: dict[str, object], shards: Mapping[str, Shard], received: list[str]
    ) -> None:
        hidden.mkdir(parents=True, exist_ok=True)
        for name, shard in shards.items():
            if (hidden / name).exists():
                verify_shard(hidden / name, shard, content=name in received)
        write_metadata(hidden, metadata)

    def _commit(self, hidden: Path, target: Path) -> None:
        """Make the hidden folder a checkpoint.

        Raises CheckpointError if this group is over, and OSError if the folder is gone; then nothing has changed.
        """
        self.fence.check()
        if self.group.is_over:
            raise PeerLost("the group was broken off")
        # A newer group that begins from here on takes the hidden folder away first, so that it cannot be renamed.
        old = hidden.with_name(f".old-{target.name}")
        hidden.stat()
        if target.exists():
            target.rename(old)
        try:
            hidden.rename(target)
        except OSError:
            if old.exists() and not target.exists():
                old.rename(target)
            raise
        sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)


def clean(folder: Path, word: str) -> None:
    """Remove what earlier groups have left half done in a folder; finished checkpoints stay.

    `word` is unique to the group that begins. Folders are renamed before they are deleted, so that a group that wakes
    up finds its own either whole or not at all.
    """
    for old in folder.glob(".old-step-*"):
        target = folder / old.name.removeprefix(".old-")
        if not target.exists():  # its group ended between two renames
            old.rename(target)
    leftovers = [path for kind in (".step-*", ".old-*") for path in folder.glob(kind)]
    for number, leftover in enumerate(leftovers):
        leftover.rename(folder / f".gone-{word}-{number}")
    for gone in folder.glob(".gone-*"):
        shutil.rmtree(gone, ignore_errors=True)


def _agreed(
    expected: Mapping[str, tuple[Sequence[int], int]], reports: Sequence[Any]
) -> tuple[dict[str, Shard], list[str]]:
    """Return the files that were written, and what went wrong; the reports come from other machines.

    `expected` names the ranks that have to write each file, and the bytes that it can have.
    """
    found: dict[str, Shard] = {}
    failed: list[str] = []
    for name, (ranks, most) in expected.items():
        for rank in ranks:
            report = reports[rank].get(name) if isinstance(reports[rank], dict) else None
            if isinstance(report, dict) and "error" in report:
                failed.append(f"rank {rank}: {report['error']}")
                continue
            try:
                shard = Shard.model_validate(report)
            except ValidationError:
                failed.append(f"rank {rank}: it does not say what it wrote")
                continue
            if shard.bytes > most:
                failed.append(f"rank {rank}: it says that {name} has {shard.bytes} bytes; at most {most} can be")
            elif found.setdefault(name, shard) != shard:
                failed.append(f"rank {rank}: its {name} differs from that of another member of the stage")
    return found, failed


_END_SECONDS = 1.0  # that the end of a group waits for the thread; a call of a broken disk cannot be interrupted


class _Worker:
    """Does the work. It knows nothing of the `Background` that it works for, whose end is to be noticed."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.idle = threading.Event()
        self.idle.set()
        self.broken = False

    def run(self) -> None:
        """Work until `end` is called, or until work fails; then drop the connections."""
        try:
            while (work := self.work.get()) is not None:
                self.broken = True  # unless the work comes to its end
                try:
                    with suppress(PeerLost):  # which the group notices by itself, if it is lost as well
                        work()
                        self.broken = False
                finally:
                    del work  # which may hold the last reference to whoever gave it
                    if self.broken:
                        self.group.abort()  # so that the other ranks' threads do not wait for this one
                    self.idle.set()
                if self.group.is_over:
                    return
        finally:
            self.group.close()

    def end(self) -> None:
        """Break the connections, and let the thread end as soon as it can."""
        self.broken = True
        self.group.abort()
        self.work.put(None)


class Background:
    """Runs work beside a group, with connections of its own, which are a twin of the group's.

    The thread ends when the group closes. It also ends when nothing refers to this object any more, once it has done
    the work that is under way, so that a group that is never closed leaves no thread behind.
    """

    def __init__(self, group: Group, name: str, timeout: float) -> None:
        """Connect; all ranks of the group call this. Raises PeerLost.

        The work waits for other ranks up to `timeout` seconds, since theirs may take long.
        """
        self._worker = worker = _Worker(group.twin(name, timeout))
        # It waits for work from the beginning: when memory is short, a thread that is started then may never begin.
        thread = threading.Thread(target=worker.run, name=name, daemon=True)
        thread.start()
        weakref.finalize(self, worker.end).atexit = False  # nothing is to wait for a daemon when the process ends

        def end_with_group() -> None:
            worker.end()
            thread.join(_END_SECONDS)  # one that is held up drops the connections when it goes on

        group.at_close(end_with_group)

    @property
    def group(self) -> Group:
        """Return the group that the work communicates in."""
        return self._worker.group

    @property
    def busy(self) -> bool:
        """Return whether work is still under way."""
        return not self._worker.idle.is_set()

    @property
    def broken(self) -> bool:
        """Return whether the connections are lost, when no work is under way."""
        return self._worker.broken

    def start(self, work: Callable[[], None]) -> None:
        """Begin with work; there must be none under way. If it raises PeerLost or anything else, that was the last."""
        assert not self.busy
        self._worker.idle.clear()
        self._worker.work.put(work)

    def wait(self, seconds: float) -> None:
        """Wait for the work that is under way, but not for longer."""
        self._worker.idle.wait(seconds)


def superfluous(folder: Path, step: int, keep: int, keeps_best: bool) -> list[Path]:
    """Return the checkpoints to delete once that of `step` is saved: all but the newest `keep`, and the best one.

    Those of later steps are another group's. A checkpoint that was to be the best may not have been saved; then the
    best one before it is kept.
    """
    there = [path for path in steps(folder) if step_of(path) <= step]
    best = next((path for path in there if was_best(path)), None) if keeps_best else None
    return [path for path in there[keep:] if path != best]


def was_best(path: Path) -> bool:
    """Return whether a checkpoint was the best one of its training when it was saved."""
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
            if was_best(step):
                metadata = read_metadata(step)
                verify(step, metadata)
                return step, metadata
    find(path)  # says what is wrong if there is no checkpoint at all
    raise CheckpointError(f"{path} has no best checkpoint: train with checkpoint.keep_best, for example held_out_loss")
