"""Finds out which ranks keep their files on one disk, and which disks keep a copy of a stage's shard.

Ranks may share a file system, or each machine may have its own disk. Every shard lies on the disks of its stage's
members, and on that of the next rank after them that is on another machine, so that a machine, and even all members of
a stage, can vanish together with their disks. Rank 0's disk has all shards, so that a job can be scaled down to any
number of ranks, and exported there.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from horizonml.comm.expected import optional, text, whole
from horizonml.comm.group import Group
from horizonml.comm.work import Work
from horizonml.errors import CheckpointError

_log = logging.getLogger(__name__)
_CHUNK = 1 << 20


class Disks:
    """Represents the disks on which the ranks of a group keep a folder that has the same path on every rank."""

    def __init__(self, folder: Path, group: Group) -> None:
        """Find out which ranks see each other's files; all ranks call this.

        The names of machines do not tell: two boards may have the same name, and a network drive may be on all of them.
        """
        self._group = group
        self.word = str(group.broadcast(uuid.uuid4().hex))  # unique to this group
        if not re.fullmatch("[0-9a-f]{32}", self.word):
            self.word = "0" * 32
        own = folder / f".probe-{self.word}-{group.rank}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            own.touch()
        except OSError as error:
            _log.warning("cannot write to %s: %s", folder, error.strerror or error)
        group.barrier()
        seen = [group.rank]
        with suppress(OSError):
            names = (name for name in os.listdir(folder) if name.startswith(f".probe-{self.word}-"))
            seen += [int(name.rpartition("-")[2]) for name in names]
        # For each rank, the first rank on the same disk.
        leads = group.gather_json(min(seen), whole(0, group.world_size - 1))
        self.leads: list[int] = [min(lead, rank) for rank, lead in enumerate(leads)]
        if self.is_lead:
            for probe in folder.glob(".probe-*"):  # includes the probes of ranks that were killed here earlier
                with suppress(OSError):
                    probe.unlink()
        group.barrier()  # no rank finds a probe that is about to be deleted
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

    def copy(self, copies: Sequence[Copy], group: Group) -> list[str]:
        """Send files between disks through the group or its twin; all ranks call this with the same copies.

        In each round every copy moves one chunk, so that no rank waits for the whole of another's file. A disk that
        fails on the way does not stop the other copies: what went wrong is returned, in the order of ranks, on all of
        them. Received files are verified when they are used. Raises PeerLost.
        """
        rank, channel = group.rank, group.channel("files")
        copies = [copy for copy in copies if copy.source != copy.target]
        mine = {copy: _Partial(copy.path, sending=copy.source == rank) for copy in copies if copy.concerns(rank)}
        try:
            for start in range(0, max((copy.size for copy in copies), default=0), _CHUNK):
                works: list[tuple[Work, int]] = []
                received: list[tuple[_Partial, Tensor]] = []
                for number, copy in enumerate(copies):
                    size = min(_CHUNK, copy.size - start)
                    if copy not in mine or size <= 0:
                        continue
                    if copy.source == rank:
                        chunk = mine[copy].read(size)
                        works.append((group.send(chunk, copy.target, channel.tag(number)), copy.target))
                    else:
                        chunk = torch.empty(size, dtype=torch.uint8)
                        works.append((group.receive(chunk, copy.source, channel.tag(number)), copy.source))
                    received.append((mine[copy], chunk))  # also keeps the tensor alive while it is sent
                for work, peer in works:
                    group.wait(work, peer)
                for partial, chunk in received:
                    partial.write(chunk)
                group.barrier()
        finally:
            for partial in mine.values():
                partial.close()
        own = next((partial.problem for partial in mine.values() if partial.problem is not None), None)
        problems = group.gather_json(own, optional(text)) if copies else []
        return [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None]


@dataclass(frozen=True)
class Copy:
    """Describes a file of `size` bytes that is copied from one rank's disk to another's."""

    path: Path
    size: int
    source: int
    target: int

    def concerns(self, rank: int) -> bool:
        """Return whether the rank sends or receives the file."""
        return rank in (self.source, self.target)


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

    def read(self, size: int) -> Tensor:
        """Return the next bytes, on the sending end."""
        chunk, done = torch.zeros(size, dtype=torch.uint8), 0
        view = chunk.numpy().data
        while self._file is not None and done < size:
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
