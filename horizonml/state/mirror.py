"""Mirrors the state of ranks that are the only members of their stages to the memory of other ranks.

Such a rank, the owner, sends a copy of its state to its buddy, a slice with each step, so that the link carries it
beside the training's own messages; then it begins anew with a newer copy. The ranks of the neighbouring stages keep the
messages that they have sent to the owner since that copy (see `comm.log`). If the owner is lost, its stages are taken
from the copy and brought to the present by repeating its work on those messages, so nobody else goes back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from horizonml.comm.group import Group, Work
from horizonml.comm.log import MessageLog
from horizonml.errors import PeerLost
from horizonml.plan.plan import Plan
from horizonml.state.train_state import TrainState

_log = logging.getLogger(__name__)

_WARM_UP = 2  # steps of a session before its owners know the size of their state and the time of a step
_LONGEST = 64  # steps for one copy, unless more can be repeated soon enough
_REPLAY_SECONDS = 30.0  # to repeat two copies' steps, at most
_HASTE = 4  # the first copy of a session may take this many times the budget, because until then there is none


@dataclass(frozen=True)
class Replica:
    """Holds the state of an owner as it was at a step; without `content`, that is the initial one.

    Frozen tensors that were read from a file are not in it: whoever rebuilds the state reads them, too.
    """

    owner: int
    step: int
    content: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name. Raises PeerLost if the owner has not sent what it announced."""
        try:
            return load(self.content.numpy().tobytes()) if self.content is not None else {}
        except SafetensorError as error:
            raise PeerLost(f"the copy of rank {self.owner}'s state cannot be read: {error}") from error


def owners(plan: Plan) -> list[int]:
    """Return the ranks whose state no other rank holds any part of, where there are several ranks."""
    if plan.world_size == 1:
        return []
    return [
        rank
        for rank in range(plan.world_size)
        if all(
            len(plan.stages[number].ranks) == 1 and not plan.stages[number].splits_channels
            for number in plan.stages_of(rank)
        )
    ]


def buddy(plan: Plan, owner: int) -> int:
    """Return the rank that keeps the replica of an owner: a member of the stage after its last one."""
    after = (max(plan.stages_of(owner)) + 1) % len(plan.stages)
    around = [plan.stages[number % len(plan.stages)] for number in range(after, after + len(plan.stages))]
    return next(rank for stage in around for rank in stage.ranks if rank != owner)


def keepers(plan: Plan, owner: int) -> set[int]:
    """Return the ranks that send messages to an owner: the members of the neighbouring stages."""
    beside = {number + step for number in plan.stages_of(owner) for step in (-1, 1)}
    return {rank for number in beside if 0 <= number < len(plan.stages) for rank in plan.stages[number].ranks} - {owner}


@dataclass(frozen=True)
class _Course:
    """Tells when an owner sends which part of its copies; all ranks know it."""

    start: int  # the step at which the first copy is taken
    bytes: int
    first: int  # steps that the first copy takes
    steps: int  # steps that each later copy takes

    def cycle(self, step: int) -> tuple[int, int, int]:
        """Return the step of the copy that is being sent at `step`, the slice, and the number of slices."""
        passed = step - self.start
        if passed < self.first:
            return self.start, passed, self.first
        number, part = divmod(passed - self.first, self.steps)
        return self.start + self.first + number * self.steps, part, self.steps

    def slice(self, step: int) -> tuple[int, int]:
        """Return where the slice of a step begins and ends."""
        _, part, parts = self.cycle(step)
        size = -(-self.bytes // parts)
        return min(part * size, self.bytes), min((part + 1) * size, self.bytes)

    def complete(self, step: int) -> int | None:
        """Return the step of the newest copy that has wholly arrived before `step` begins, or None."""
        began, _, _ = self.cycle(step)
        if began == self.start:
            return None
        return self.start if began == self.start + self.first else began - self.steps


class Mirror:
    """Runs the mirroring of one session on one rank."""

    def __init__(
        self,
        plan: Plan,
        state: TrainState,
        group: Group,
        bytes_per_second: Callable[[int], float],
        budget: float,
        log_bytes: int,
    ) -> None:
        """Prepare; all ranks of the group call this. `bytes_per_second(rank)` is the speed of the link to a rank.

        A copy is sent in as many steps as keep its messages below `budget`, a share of the time of a step.
        """
        self.plan, self._state, self._group = plan, state, group
        self._speed, self._budget = bytes_per_second, budget
        self.owners = owners(plan)
        mine = [owner for owner in self.owners if group.rank in keepers(plan, owner)]
        self.log = MessageLog(mine, group.channel("boundaries").tags, log_bytes)
        group.log = self.log if mine else None
        # At step 0 everyone knows everyone's state.
        self.replicas = {owner: Replica(owner, 0) for owner in self.owners} if state.step == 0 else {}
        self.bare: set[int] = set()  # the owners that cannot be mirrored within the budget
        self._courses: dict[int, _Course] = {}
        self._begun: int | None = None
        self._seconds = math.inf
        self._own: Tensor | None = None  # the copy that is being sent
        self._arriving: dict[int, Tensor] = {}
        self._works: list[tuple[Work, int]] = []

    def before_step(self, seconds: float) -> None:
        """Send and receive the slices that go along with the next step; `seconds` is how long the last one took.

        Raises PeerLost.
        """
        step = self._state.step
        self._finish_slices(step)
        self._begun = step if self._begun is None else self._begun
        if step > self._begun:
            self._seconds = min(self._seconds, seconds)
        if step == self._begun + _WARM_UP:
            self._set_out(step)
        for owner, course in self._courses.items():
            self._slice(owner, course, step)
        self.log.begin(step)

    def finish(self) -> None:
        """Wait for what is under way, before another plan's mirror takes over. Raises PeerLost."""
        for work, peer in self._works:
            self._group.wait(work, peer)
        self._works = []

    def after_step(self) -> None:
        """Stop logging until the next step."""
        self.log.pause()

    @property
    def is_owner(self) -> bool:
        """Return whether no other rank holds this rank's state because of the plan."""
        return self._group.rank in self.owners

    @property
    def age(self) -> int | None:
        """Return how many steps old the newest replica of this rank's state is, or None if there is none."""
        rank = self._group.rank
        if rank not in self.owners or rank in self.bare:
            return None
        found = self._courses[rank].complete(self._state.step) if rank in self._courses else None
        if found is None:
            return self._state.step if self._from_the_start else None
        return self._state.step - found

    @property
    def _from_the_start(self) -> bool:
        return self._begun == 0

    def _set_out(self, step: int) -> None:
        """Agree on which rank sends what, and when."""
        own = None
        if self._group.rank in self.owners:
            budget = self._speed(buddy(self.plan, self._group.rank)) * self._budget * self._seconds
            size = len(save(self._contiguous()))
            longest = max(_LONGEST, int(_REPLAY_SECONDS / 2 / max(self._seconds, 1e-3)))
            own = [size, max(1, math.ceil(size / max(1.0, budget))), longest]
        answers = self._group.gather_json([own, self.log.room])
        for owner in self.owners:
            size, steps, longest = map(int, answers[owner][0])
            # Just before a copy is complete, the log reaches back to the beginning of the one before.
            longest = min(longest, *(int(answers[keeper][1]) // 2 - 1 for keeper in keepers(self.plan, owner)))
            if steps <= longest:
                self._courses[owner] = _Course(step, size, max(1, steps // _HASTE), steps)
            else:
                self.bare.add(owner)
                if owner == self._group.rank:
                    _log.warning(
                        "no other rank keeps a copy of rank %d's state: %.1f MB would take %d steps on this link, and "
                        "only %d can be bridged; raise recovery.mirror_budget or recovery.log_bytes, or choose a plan "
                        "in which every stage has several members", owner, size / 1e6, steps, max(0, longest),
                    )  # fmt: skip

    def _contiguous(self) -> dict[str, Tensor]:
        return {name: tensor.contiguous() for name, tensor in self._state.own().items()}

    def _slice(self, owner: int, course: _Course, step: int) -> None:
        """Send, or post the receive for, an owner's slice of this step."""
        rank, target = self._group.rank, buddy(self.plan, owner)
        if rank not in (owner, target):
            return
        begin, end = course.slice(step)
        tag = self._group.channel("mirror").tag(owner)
        if rank == owner:
            if course.cycle(step)[1] == 0:
                self._own = torch.frombuffer(bytearray(save(self._contiguous())), dtype=torch.uint8)
                if len(self._own) != course.bytes:  # a parameter was first updated after the ranks had agreed on sizes
                    self._own = torch.zeros(course.bytes, dtype=torch.uint8)  # which nobody takes for a state
            assert self._own is not None
            if end > begin:
                self._works.append((self._group.send(self._own[begin:end], target, tag), target))
        else:
            if course.cycle(step)[1] == 0:
                self._arriving[owner] = torch.empty(course.bytes, dtype=torch.uint8)
            if end > begin:
                self._works.append((self._group.receive(self._arriving[owner][begin:end], owner, tag), owner))

    def _finish_slices(self, step: int) -> None:
        """Wait for the slices of the step before, and drop what newer copies make superfluous."""
        self.finish()
        needed = []
        for owner, course in self._courses.items():
            complete = course.complete(step)
            if complete is not None and course.cycle(step)[1] == 0 and owner in self._arriving:
                self.replicas[owner] = Replica(owner, complete, self._arriving.pop(owner))
            # Only once the step before this one has ended everywhere have all ranks seen the copy complete.
            known = course.complete(step - 1) if step > course.start else None
            needed.append(known if known is not None else 0)
        if self._courses or self.bare:
            self.log.forget(min(needed, default=step))

    def report(self) -> dict[str, Any]:
        """Return what this rank could contribute to rebuilding lost owners, as plain JSON values."""
        first = self.log.first
        replicas = {str(owner): replica.step for owner, replica in self.replicas.items()}
        return {"replicas": replicas, "log": first}


@dataclass(frozen=True)
class Rebuild:
    """Tells how a lost owner's stages are rebuilt. Ranks are those of the group that was lost."""

    owner: int
    step: int  # of the replica
    builder: int
    keepers: tuple[int, ...]


def rebuilds(plan: Plan, missing: list[int], reports: Mapping[int, Mapping[str, Any]]) -> list[Rebuild] | None:
    """Return how to rebuild the owners of the missing layers, or None if it cannot be done.

    `reports[r]` is the report of rank r of the group that was lost, if it survived.
    """
    lost = sorted(
        {rank for stage in plan.stages for rank in stage.ranks if any(stage.start <= n < stage.stop for n in missing)}
    )
    found = []
    for owner in lost:
        if owner in reports or owner not in owners(plan):
            return None
        having = {
            rank: int(report["replicas"][str(owner)])
            for rank, report in reports.items()
            if str(owner) in report["replicas"]
        }
        sources = keepers(plan, owner)
        if not having or not sources <= reports.keys():
            return None
        # An initial state is known to all, and a copy to the buddy only, which therefore comes first.
        builder = max(having, key=lambda rank: (having[rank], rank == buddy(plan, owner)))
        firsts = [reports[rank]["log"] for rank in sources]
        if any(first is None or int(first) > having[builder] for first in firsts):
            return None
        found.append(Rebuild(owner, having[builder], builder, tuple(sorted(sources))))
    return found
