"""Saves and resumes checkpoints: the state of a training at a step boundary, complete or not there at all.

Between two steps, each rank copies what it is to write, and training goes on while a thread writes it (see `saver`).
The last checkpoint of a training is written while everybody waits. Tensors carry the model's own names, so a checkpoint
can be resumed with any plan and any world size.

Where machines have their own disks, `disks` decides which of them keep a copy of a shard. The fence of `runfolder`
keeps groups that are over from writing.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from horizonml.comm.expected import boolean, fields, mapping, text
from horizonml.comm.group import Group
from horizonml.data.dataset import DataInfo
from horizonml.errors import CheckpointError, PeerLost, is_out_of_memory
from horizonml.job.schema import Job
from horizonml.models.zoo import Model
from horizonml.plan.lossy import tried_from
from horizonml.plan.plan import Plan
from horizonml.state.carry import digests_of, memory_here, share_state
from horizonml.state.disks import DiskProbe, Snapshot, Token, find_disks, take
from horizonml.state.resume import Resumption
from horizonml.state.runfolder import Fence, Term
from horizonml.state.saver import Background, Saver, clean
from horizonml.state.shards import Metadata, folder_name, is_folder_name, step_of, steps
from horizonml.state.train_state import TrainState

_log = logging.getLogger(__name__)
_LAST_SECONDS = 300.0  # that the end of a training which fails waits for the checkpoint that is being written
_SLOWEST_DISK = 3600.0  # seconds that the threads wait for one another's disks, while training goes on


@dataclass(frozen=True)
class Saved:
    """Describes what became of a checkpoint."""

    step: int
    problems: list[str]  # empty if it is saved
    pause: float  # seconds that training waited
    writing: float = 0.0  # seconds that a thread was writing beside the training


@dataclass(frozen=True)
class FoundCheckpoints:
    """What a rank has found in the folder of checkpoints, before its group has agreed on anything."""

    token: Token
    term: Term | None  # of the newest group that has begun there
    newest: int | None  # the newest step of which there is a checkpoint, whole or not


class Arrival:
    """Looks at the folder of checkpoints as a rank comes to a group, which announces itself there later."""

    def __init__(self, folder: Path) -> None:
        self.probe, self.fence = DiskProbe(folder), Fence(folder)
        there = [*steps(folder), *(old.with_name(old.name.removeprefix(".old-")) for old in folder.glob(".old-step-*"))]
        newest = max((step_of(path) for path in there if is_folder_name(path.name)), default=None)
        self.found = FoundCheckpoints(self.probe.token, self.fence.newest(), newest)


class Checkpoints:
    """Saves and resumes the checkpoints of a run, as one rank of its group."""

    def __init__(
        self,
        folder: Path,
        group: Group,
        keep: int,
        compatible: dict[str, object],
        names: list[str] | None = None,
        generation: int = 0,
        arrival: Arrival | None = None,
        found: Sequence[FoundCheckpoints] = (),
    ) -> None:
        """Prepare the folder; all ranks of the group call this.

        A checkpoint can be resumed only if it agrees with `compatible`. `names[r]` is the name of rank r's machine.
        `found` is what all ranks have found at their `arrival`, if they have told each other already. Raises PeerLost
        if a group newer than `generation` has begun in the folder.
        """
        self._folder, self._group = folder, group
        if arrival is None:
            arrival = Arrival(folder)
            found = group.exchange(arrival.found)
        self._newest_found = max((one.newest for one in found if one.newest is not None), default=-1)
        self._disks, self._fence = find_disks(arrival.probe, [one.token for one in found], group), arrival.fence
        self._fence.word = self._disks.word[:8]
        self.newest: int | None = None  # the step of the checkpoint that was saved or resumed last
        self.skipped = 0  # how many were not saved because the one before was still being written
        self._term = Term.after((one.term for one in found), generation)
        self.announce()
        places = _places(group, names)
        self._saver = Saver(folder, group, self._disks, self._fence, keep, compatible, places)
        self._resumption = Resumption(folder, group, self._disks, compatible, places)
        self._background = Background(group, "checkpoints", _SLOWEST_DISK)
        self.on_saved: Callable[[Path], object] = lambda path: None  # is told of each checkpoint that is saved
        self._results: deque[Saved] = deque()
        self._told: set[str] = set()  # the warnings that are given once
        self._causes: list[str] = []  # of the last failure, as they were told

    def announce(self) -> None:
        """Announce this group in the folder, and remove what earlier ones have left half done."""
        self._fence.term = self._term
        if self._disks.is_lead:
            self._fence.begin()
            try:
                clean(self._folder, self._disks.word)
            except OSError as error:
                _log.warning("cannot clean %s: %s", self._folder, error.strerror or error)

    def save(self, state: TrainState, plan: Plan, details: dict[str, object]) -> list[str]:
        """Write a checkpoint of the state, while training waits; all ranks call this after the same step.

        `details` go into the metadata. Return what went wrong, and on which rank; the list is empty if the checkpoint
        is saved. If it is not, training can go on, and the existing checkpoints are kept.
        """
        started = time.perf_counter()
        self._background.wait(self._group.timeout / 2)
        busy, _, _ = self._prepare(state, plan)
        problems = [f"rank {rank}: an earlier checkpoint is still being written" for rank in busy]
        problems = problems or self._saver.save(take(state, plan, self._group, self._disks, details, copy=False))
        self._note(Saved(state.step, problems, time.perf_counter() - started))
        return problems

    def begin(self, state: TrainState, plan: Plan, details: dict[str, object], *, must: bool = False) -> None:
        """Copy the state, and write a checkpoint of it while training goes on; all ranks call this after the same step.

        If the previous checkpoint is still being written, there will be none of this step, unless there `must` be one:
        then training waits. It also waits if a rank has no memory for its copy. `finished` tells what became of each.
        """
        started = time.perf_counter()
        busy, broken, roomy = self._prepare(state, plan)
        if busy and not must:
            self._skip(state.step, busy)
        elif busy or broken or not roomy:
            lost = "the threads that write checkpoints lost one another: from now on, training waits for them"
            crowded = "there is too little memory for a copy of the state: training waits for its checkpoints"
            if not busy:  # or the thread is neither of both, but at work
                self._warn_once(lost if broken else crowded)
            self.save(state, plan, details)
        else:
            snapshot = take(state, plan, self._group, self._disks, details, copy=True)
            pause = time.perf_counter() - started
            self._background.start(lambda: self._write(snapshot, pause))

    def finish(self, together: bool) -> None:
        """Wait for the checkpoint that is being written, since training fails now; say so if it is given up.

        With `together`, all ranks of the group call this. Otherwise the others wait for this one meanwhile, and not for
        longer than the group's timeout.
        """
        seconds = _LAST_SECONDS if together else self._group.timeout / 2
        self._background.wait(seconds)
        if self._background.busy:
            _log.warning(
                "the checkpoint that was being written when training failed is given up: it is not complete after "
                "%.0f s",
                seconds,
            )
        if together:  # or the first to end would break the connections in which the others agree that it is complete
            with suppress(PeerLost):
                self._group.barrier()

    def finished(self) -> list[Saved]:
        """Return what became of the checkpoints that were written since the last call."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def _write(self, snapshot: Snapshot, pause: float) -> None:
        """Write a snapshot, in the thread. Raises PeerLost if the ranks' threads have lost one another."""
        started = time.perf_counter()
        try:
            problems = replace(self._saver, group=self._background.group).save(snapshot)
        except (PeerLost, MemoryError, RuntimeError) as error:
            if not isinstance(error, PeerLost) and not is_out_of_memory(error):
                raise
            # If the whole group is over, nobody asks for this any more; if it is not, `begin` says what comes of it.
            problems = [f"rank {self._group.rank}: {error}"]
            self._results.append(Saved(snapshot.step, problems, pause, time.perf_counter() - started))
            raise PeerLost(str(error)) from error
        self._note(Saved(snapshot.step, problems, pause, time.perf_counter() - started))

    def _prepare(self, state: TrainState, plan: Plan) -> tuple[list[int], bool, bool]:
        """Make the members of a stage hold the same state again: processors that round differently drift apart.

        Return the ranks whose threads are still writing, whether threads have lost one another, and whether all ranks
        have memory for a copy of their state.
        """
        digests = digests_of(state, plan, self._group.rank, quick=True)
        roomy = state.bytes() < memory_here(self._group)
        own = [self._background.busy, self._background.broken, roomy, digests]
        reports = self._group.gather_json(own, fields(boolean, boolean, boolean, mapping(text)))
        busy, broken, rooms, everyone = zip(*reports, strict=True)
        drifted = share_state(state, plan, self._group, everyone)
        if drifted:
            self._warn_once(
                "rank %s rounds differently from the first member of its stage, and takes over that member's state at "
                "every checkpoint",
                ", ".join(str(rank) for rank, _ in drifted),
            )
        return [rank for rank, writes in enumerate(busy) if writes], any(broken), all(rooms)

    def _skip(self, step: int, ranks: list[int]) -> None:
        self.skipped += 1
        self._warn_once(
            "there will be no checkpoint of step %d: the one before is still being written by %s. Further ones may be "
            "left out as well; a larger checkpoint.every_steps or a faster disk helps",
            step,
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}",
        )

    def _warn_once(self, text: str, *values: object) -> None:
        if text not in self._told:
            self._told.add(text)
            _log.warning(text, *values)

    def _note(self, saved: Saved) -> None:
        """Keep what became of a checkpoint, and tell the user, unless it failed like the one before."""
        causes = [re.sub(r"step-\d+[\w-]*", "step", problem) for problem in saved.problems]
        if not causes:
            self.newest = saved.step
            self.on_saved(self._folder / folder_name(saved.step))
            if self._causes:
                _log.warning("checkpoints are saved again: that of step %d is", saved.step)
        elif causes != self._causes:
            for problem in saved.problems:
                _log.warning("the checkpoint of step %d was not saved: %s", saved.step, problem)
        self._causes = causes
        self._results.append(saved)

    def set_aside(self) -> None:
        """Move the checkpoints of an earlier run out of the way; all ranks call this.

        They are kept as `checkpoints.previous`. Raises CheckpointError.
        """

        def move() -> None:
            if steps(self._folder):
                previous = self._folder.with_name(self._folder.name + ".previous")
                shutil.rmtree(previous, ignore_errors=True)
                self._folder.rename(previous)
                self.announce()

        problems = self._disks.everywhere(move, self._group)
        if problems:
            raise CheckpointError(f"the checkpoints of an earlier run cannot be moved: {'; '.join(problems)}")

    def newer_than(self, step: int) -> int | None:
        """Return the step of the newest intact checkpoint after `step`, or None; all ranks call this."""
        known = max(self._newest_found, -1 if self.newest is None else self.newest)
        return self._resumption.newer_than(step) if known > step else None

    def resume(self, state: TrainState, plan: Plan) -> Metadata | None:
        """Load the newest checkpoint that is intact on all machines together; return None if there is none.

        `state` must hold the layers that this rank has in the plan. Damaged checkpoints are skipped, and a message
        names them. Raises CheckpointError if all are damaged, or if the one to resume belongs to another model or other
        data, and ShardsAway, on all ranks, if machines that are not in the group keep what is missing.
        """
        metadata = self._resumption.resume(state, plan)
        if metadata is not None:
            self.newest = state.step = metadata.step
            state.valid = True
            state.metrics, state.best = dict(metadata.metrics), dict(metadata.best)
            state.tried = tried_from(metadata.tried)
        return metadata


def _places(group: Group, names: list[str] | None) -> list[str]:
    """Return, for each rank, where its machine is, for people: two boards may have the same name."""
    found = []
    for rank, host in enumerate(group.hosts):
        name, address = names[rank] if names is not None else f"rank {rank}", host.partition("/")[2]
        found.append(f"{name} at {address}" if address else name)
    return found


def compatible_with(job: Job, info: DataInfo, model: Model) -> dict[str, object]:
    """Return what a checkpoint must agree with so that going on from it makes sense."""
    return {
        "model": job.model.identity(),
        **({"weights": model.pretrained.digest} if model.pretrained is not None else {}),
        "data": job.data.name,
        **({"characters": _fingerprint(info.characters)} if info.characters else {}),
        "samples": info.train,
        "seed": job.seed,
        "batch_size": job.batch_size,
        "optimizer": job.optimizer.name,
    }


def _fingerprint(characters: str) -> str:
    """Return how many characters there are, and what differs for other ones."""
    return f"{len(characters)} (SHA-256 {hashlib.sha256(characters.encode('utf-8', 'surrogatepass')).hexdigest()[:8]})"
