"""Which ranks keep their files on one disk, and which disks keep a copy of a stage's shard.

Ranks may share a file system, or each machine may have its own disk. Every shard lies on the disks of its stage's
members, and on the next disk after them that is not a member's, so that a machine, and even all members of a stage, can
vanish together with their disks.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

import torch

from horizonml.engine.group import Group

_log = logging.getLogger(__name__)
_TAG = (1 << 30) + 200
_CHUNK = 4 << 20


class Disks:
    """The disks on which the ranks of a group keep a folder, as each rank sees it under the same name."""

    def __init__(self, folder: Path, group: Group) -> None:
        """Find out which ranks see each other's files; all ranks call this.

        Names of machines say nothing: two boards may have the same name, and a network drive may be on all of them.
        """
        self._group = group
        word = str(group.share_json(uuid.uuid4().hex))
        if not re.fullmatch("[0-9a-f]{32}", word):
            word = "0" * 32
        own = folder / f".probe-{word}-{group.rank}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            own.touch()
        except OSError as error:
            _log.warning("cannot write checkpoints to %s: %s", folder, error.strerror or error)
        group.gather_json(None)
        seen = [group.rank]
        with suppress(OSError):
            seen += [int(name.rpartition("-")[2]) for name in os.listdir(folder) if name.startswith(f".probe-{word}-")]
        # For each rank, the first rank on the same disk.
        self.leads: list[int] = [min(int(lead), rank) for rank, lead in enumerate(group.gather_json(min(seen)))]
        with suppress(OSError):
            own.unlink(missing_ok=True)
        self.ring = sorted(set(self.leads))

    @property
    def is_lead(self) -> bool:
        """Whether this rank looks after the files on its disk."""
        return self.leads[self._group.rank] == self._group.rank

    def writers(self, members: Sequence[int]) -> dict[int, int]:
        """Return, for each disk of a stage's members, the member that writes there; a disk is named by its lead."""
        return {self.leads[rank]: rank for rank in reversed(members)}

    def keepers(self, members: Sequence[int]) -> list[int]:
        """Return the disks that keep a stage's shard: its members', and the next one in the ring, if there is one."""
        own = sorted(self.writers(members))
        start = self.ring.index(own[-1])
        others = [disk for disk in [*self.ring[start:], *self.ring[:start]] if disk not in own]
        return own + others[:1]

    def copy(self, path: Path, size: int, source: int, target: int) -> None:
        """Send a file of `size` bytes from one rank's disk to another's, where it is checked when it is used.

        All ranks call this for the same files in the same order.
        """
        rank = self._group.rank
        if rank not in (source, target) or source == target:
            return
        left, sending = size, rank == source
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
            if not sending:
                with suppress(OSError):  # the file is checked when it is used
                    file.flush()
                    os.fsync(file.fileno())


def _open_or_warn(path: Path, mode: Literal["rb", "wb"]) -> IO[bytes]:
    """Open the file; if that fails, nothing that can be read or written: the other rank waits for so many bytes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open(mode)
    except OSError as error:
        _log.warning("%s: %s", path, error.strerror or error)
        return Path(os.devnull).open(mode)
