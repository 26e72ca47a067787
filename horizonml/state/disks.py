"""Finds out which ranks keep their files on one disk, and which disks keep a copy of a stage's shard.

Ranks may share a file system, or each machine may have its own disk. Every shard lies on the disks of its stage's
members, and on that of the next rank after them that is on another machine, so that a machine, and even all members of
a stage, can vanish together with their disks. Rank 0's disk has all shards, so that a job can be scaled down to any
number of ranks, and exported there.

What a rank writes of a checkpoint, as it was at one step boundary, is its `Snapshot`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from horizonml.comm.expected import optional, text, whole
from horizonml.comm.group import Group
from horizonml.errors import CheckpointError
from horizonml.plan.plan import Plan
from horizonml.state.carry import Parcel, carry
from horizonml.state.optim import in_common, is_inner
from horizonml.state.runfolder import PROBE
from horizonml.state.shards import inner_name
from horizonml.state.train_state import TrainState

_log = logging.getLogger(__name__)
_CHUNK = 1 << 20


Token = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]  # of a rank's probe


class DiskProbe:
    """A file of this rank, by whose name the other ranks find out whether they see the same folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.token = folder, uuid.uuid4().hex
        self._earlier: list[str] = []  # those of ranks that were killed here
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._earlier = self._names()
            (folder / f"{PROBE}{self.token}").touch()
        except OSError as error:
            _log.warning("cannot write to %s: %s", folder, error.strerror or error)

    def _names(self) -> list[str]:
        return [name for name in os.listdir(self._folder) if name.startswith(PROBE)]

    def lead(self, tokens: Sequence[str], rank: int) -> int:
        """Return the first rank whose file is here; `tokens` are those of all ranks, whose files are all written."""
        try:
            names = set(self._names())
        except OSError:
            return rank
        return min([rank, *(other for other, token in enumerate(tokens) if f"{PROBE}{token}" in names)])

    def remove(self) -> None:
        """Delete the file, once all ranks have looked, and those that were left behind before."""
        for name in [f"{PROBE}{self.token}", *self._earlier]:
            with suppress(OSError):
                (self._folder / name).unlink()


def find_disks(probe: DiskProbe, tokens: Sequence[str], group: Group) -> Disks:
    """Find out which ranks see each other's files; all ranks call this, with the `tokens` of all. Raises PeerLost.

    The names of machines do not tell: two boards may have the same name, and a network drive may be on all of them.
    """
    leads = group.gather_json(probe.lead(tokens, group.rank), whole(0, group.world_size - 1))
    probe.remove()
    word = hashlib.sha256(" ".join(tokens).encode()).hexdigest()[:32]
    return Disks(group, word, [min(lead, rank) for rank, lead in enumerate(leads)])


class Disks:
    """Represents the disks on which the ranks of a group keep a folder that has the same path on every rank."""

    def __init__(self, group: Group, word: str, leads: list[int]) -> None:
        """`word` is unique to the group, and `leads[r]` is the first rank on the disk of rank r."""
        self._group, self.word, self.leads = group, word, leads
        self.ring = sorted(set(self.leads))

    @property
    def is_lead(self) -> bool:
        """Return whether this rank manages the files on its disk."""
        return self.leads[self._group.rank] == self._group.rank

    def writers(self, members: Sequence[int]) -> dict[int, int]:
        """Return, for each disk of a stage's members, the member that writes there; a disk is named by its lead."""
        return {self.leads[rank]: rank for rank in reversed(members)}

    def keepers(self, members: Sequence[int]) -> list[int]:
        """Return the disks that keep a stage's shard: its members', another one if there is one, and that of rank 0.

        The other one is the next disk in the ring that is on a machine of none of the members, or else simply the next.
        """
        own = sorted(self.writers(members))
        start = self.ring.index(own[-1])
        others = [disk for disk in [*self.ring[start:], *self.ring[:start]] if disk not in own]
        machines = {self._machine(rank) for rank in members}
        more = sorted(others, key=lambda disk: self._machine(disk) in machines)[:1]
        return list(dict.fromkeys([*own, *more, 0]))

    def _machine(self, rank: int) -> str:
        """Return a value that all containers on a rank's machine share."""
        return self._group.hosts[rank].partition("/")[0]

    def everywhere(self, action: Callable[[], None], group: Group) -> list[str]:
        """Run `action` on every disk; return what went wrong, in the order of ranks, on all ranks of the group."""
        problem = None
        if self.is_lead:
            try:
                action()
            except (OSError, CheckpointError) as error:
                problem = str(error)
        found = group.gather_json(problem, optional(text))
        return [f"rank {rank}: {problem}" for rank, problem in enumerate(found) if problem is not None]

    def copy(self, copies: Sequence[FileCopy], group: Group) -> list[str]:
        """Send files between disks through the group or its twin; all ranks call this with the same copies.

        In each round every copy moves one chunk, so that no rank waits for the whole of another's file. A disk that
        fails on the way does not stop the other copies: what went wrong is returned, in the order of ranks, on all of
        them. Received files are verified when they are used. Raises PeerLost.
        """
        rank = group.rank
        copies = [copy for copy in copies if copy.source != copy.target]
        own = [copy for copy in copies if rank in (copy.source, copy.target)]
        mine = {copy: _Partial(copy.path, sending=copy.source == rank) for copy in own}
        try:
            for start in range(0, max((copy.size for copy in copies), default=0), _CHUNK):
                chunks: dict[FileCopy, Parcel] = {}
                for copy, partial in mine.items():
                    if start < copy.size:
                        chunk = partial.chunk(min(_CHUNK, copy.size - start))
                        chunks[copy] = Parcel(copy.path.name, chunk, copy.source, copy.target)
                carry(chunks.values(), group, "files")
                for copy, parcel in chunks.items():
                    mine[copy].write(parcel.tensor)
                group.barrier()
        finally:
            for partial in mine.values():
                partial.close()
        problem = next((partial.problem for partial in mine.values() if partial.problem is not None), None)
        problems = group.gather_json(problem, optional(text)) if copies else []
        return [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None]


@dataclass(frozen=True)
class FileCopy:
    """Describes a file of `size` bytes that is copied from one rank's disk to another's."""

    path: Path
    size: int
    source: int
    target: int


class _Partial:
    """Handles one end of a copy.

    After an error it reads zeros and writes nothing, because the other end still expects the announced number of bytes.
    """

    def __init__(self, path: Path, sending: bool) -> None:
        self._path, self._sending = path, sending
        self.problem: str | None = None  # what went wrong, if anything did
        self._file: FileIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(path, "rb" if sending else "wb")
        except OSError as error:
            self._give_up(error)

    def chunk(self, size: int) -> Tensor:
        """Return the next bytes, on the sending end, or memory for them."""
        chunk, done = torch.zeros(size, dtype=torch.uint8), 0
        view = chunk.numpy().data
        while self._file is not None and self._sending and done < size:
            try:
                count = self._file.readinto(view[done:])
            except OSError as error:
                self._give_up(error)
                break
            if not count:
                break
            done += count
        return chunk

    def write(self, chunk: Tensor) -> None:
        """Append bytes, on the receiving end."""
        view, done = chunk.numpy().data, 0
        while self._file is not None and not self._sending and done < len(view):
            try:
                done += self._file.write(view[done:])
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Make the received bytes durable."""
        if self._file is not None:
            try:
                if not self._sending:
                    os.fsync(self._file.fileno())
                self._file.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.problem = f"{self._path} cannot be {'read' if self._sending else 'written'}: {error.strerror or error}"
        _log.warning("%s", self.problem)
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None


@dataclass(frozen=True)
class Snapshot:
    """Holds what one rank writes of a checkpoint."""

    step: int
    plan: Plan
    details: dict[str, Any]  # for the metadata
    tensors: dict[int, dict[str, Tensor]]  # those of each stage whose shard this rank writes
    most: list[int]  # bytes that each stage's shard can have
    inner: dict[str, dict[str, Tensor]]  # the state of this rank's own optimizer by file, after local steps


def take(
    state: TrainState, plan: Plan, group: Group, disks: Disks, details: dict[str, object], *, copy: bool
) -> Snapshot:
    """Return a snapshot of the state; all ranks call this after the same step. Raises PeerLost.

    Unless `copy` is true, it consists of the state's own tensors, and is valid only until the next step.
    """
    tensors: dict[int, dict[str, Tensor]] = {}
    inner: dict[str, dict[str, Tensor]] = {}
    for number in plan.stages_of(group.rank):
        stage = plan.stages[number]
        whole = state.whole(group, stage.start, stage.stop)  # all members have to put them together
        if group.rank in disks.writers(stage.ranks).values():
            copied = copy and not state.copies
            tensors[number] = {key: _plain(value, copied) for key, value in in_common(whole, plan).items()}
        if plan.local is not None:
            own = {key: _plain(value, copy and not state.copies) for key, value in whole.items() if is_inner(key)}
            inner[inner_name(stage.ranks.index(group.rank), number)] = own
    most = [state.most_bytes(range(stage.start, stage.stop)) for stage in plan.stages]
    return Snapshot(state.step, plan, details, tensors, most, inner)


def _plain(tensor: Tensor, copy: bool) -> Tensor:
    tensor = tensor.detach()
    return tensor.clone(memory_format=torch.contiguous_format) if copy else tensor.contiguous()


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a tensor with values that are not finite, if there is one.

    It looks at pieces that PyTorch does not divide among threads, which the training needs.
    """
    for key, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            for piece in tensor.view(-1).split(1 << 14):
                if not bool(torch.isfinite(piece).all()):
                    return key
    return None
