"""Mirrors the state of ranks that alone hold it to the memory of other ranks.

Such a rank, the owner, sends a copy of its state to its buddy, a slice with each step, so that the link carries it
beside the training's own messages; then it begins anew with a newer copy. The ranks of the neighbouring stages keep the
messages that they have sent to the owner since that copy (see `comm.work`). If the owner is lost, its stages are taken
from the copy and brought to the present by repeating its work on those messages, so nobody else goes back.

With two mirrors, any two ranks may be lost at once: every owner has two buddies, a stage of two members has an owner,
too, and all copies are taken at the same step. If ranks are lost whose messages another lost rank needs, the work of
all of them is repeated together (see `comm.playback`).

Where the members of a stage split channels, each is an owner of its parts. All take their copies at the same step, so
that they make up whole layers, and keep them, too, because the parts that are left must fit the copy of those that are
lost. A copy is one piece of memory, with the bytes of a safetensors file.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from horizonml.comm.expected import fields, optional, whole
from horizonml.comm.group import Group
from horizonml.comm.work import MessageLog, Work
from horizonml.errors import PeerLost
from horizonml.plan.plan import Plan, Sync
from horizonml.state.carry import Parcel
from horizonml.state.train_state import TrainState


class Packer:
    """Remembers where each tensor of a state lies in the file, so that a further copy only moves the values."""

    def __init__(self) -> None:
        self._head = torch.empty(0, dtype=torch.uint8)  # the length of the header, and the header
        self._places: dict[str, tuple[int, int]] = {}  # where the bytes of each tensor begin and end

    def pack(self, state: TrainState, into: Tensor | None = None) -> Tensor:
        """Return a copy of all tensors as bytes: in `into` if that has the right size, or else in new memory.

        What is frozen and came from a file is left out, because whoever rebuilds the state reads it, too.
        """
        held = state.tensors().items()
        tensors = {name: tensor.contiguous() for name, tensor in held if not state.is_constant(name)}
        sizes = {name: end - begin for name, (begin, end) in self._places.items()}
        if not len(self._head) or sizes != {name: tensor.nbytes for name, tensor in tensors.items()}:
            self._lay_out(tensors)
        total = max((end for _, end in self._places.values()), default=len(self._head))
        if into is None or len(into) != total:
            into = torch.empty(total, dtype=torch.uint8)
        into[: len(self._head)] = self._head
        for name, (begin, end) in self._places.items():
            into[begin:end].copy_(tensors[name].view(-1).view(torch.uint8))
        return into

    def _lay_out(self, tensors: dict[str, Tensor]) -> None:
        """Let safetensors decide on the places, which depend on names, shapes and dtypes only."""
        content = bytearray(save(tensors))
        start = 8 + int.from_bytes(content[:8], "little")
        self._head = torch.frombuffer(content, dtype=torch.uint8)[:start].clone()
        header = json.loads(content[8:start])
        self._places = {
            name: (start + header[name]["data_offsets"][0], start + header[name]["data_offsets"][1]) for name in tensors
        }


_log = logging.getLogger(__name__)

_WARM_UP = 2  # steps of a session before its owners know the size of their state and the time of a step
_LONGEST = 64  # steps for one copy, unless more can be repeated soon enough
_REPLAY_SECONDS = 30.0  # to repeat two copies' steps, at most
_HASTE = 4  # the first copy of a session may take this many times the budget, because until then there is none


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


@dataclass(frozen=True)
class Report:
    """What a rank could contribute to rebuilding lost owners."""

    replicas: dict[int, list[int]]  # the steps of its copies of each owner's state
    log: int | None  # the first step of which it has the messages


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
        mirrors: int = 1,
    ) -> None:
        """Prepare; all ranks of the group call this. `bytes_per_second(rank)` is the speed of the link to a rank.

        A copy is sent in as many steps as keep its messages below `budget`, a share of the time of a step. `mirrors` is
        how many ranks may be lost at once.
        """
        self.plan, self._state, self._group = plan, state, group
        self._speed, self._budget = bytes_per_second, budget
        self._buddies = buddies(plan, mirrors, group.hosts)
        self.owners = list(self._buddies)
        self.parts = dict(state.parts)  # which part of a tensor each member has, where members split channels
        self.mirrors = mirrors
        self._alike = mirrors > 1  # whether all copies are taken at the same step
        self.ties = [[state.layer_of(f"model/{name}") for name in names] for names in state.model.ties]
        received = [owner for owner in self.owners if group.rank in keepers(plan, owner, self.ties)]
        mine = {rank for owner in received for number in plan.stages_of(owner) for rank in plan.stages[number].ranks}
        self.log = MessageLog(mine, group.channel("boundaries").tags, log_bytes)
        group.log = self.log if mine else None
        # At step 0 everyone knows everyone's state.
        self.replicas = {owner: [Replica(owner, 0)] for owner in self.owners} if state.step == 0 else {}  # newest last
        self.bare: set[int] = set()  # the owners that cannot be mirrored within the budget
        self._courses: dict[int, _Course] = {}
        self._begun: int | None = None
        self._seconds = math.inf
        self._own: Tensor | None = None  # the copy that is being sent
        self._packer = Packer()
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
            return self._state.step if self._begun == 0 else None  # at step 0 everyone knew everyone's state
        return self._state.step - found

    def _set_out(self, step: int) -> None:
        """Agree on which rank sends what, and when."""
        own = None
        if self._group.rank in self.owners:
            targets = self._buddies[self._group.rank]
            speed = min(map(self._speed, targets), default=math.inf) / max(1, len(targets))
            budget = speed * self._budget * self._seconds
            self._own = self._packer.pack(self._state)
            size = len(self._own)
            members = len(together(self.plan, self._group.rank))  # whose work one rank would repeat
            longest = max(_LONGEST, int(_REPLAY_SECONDS / 2 / members / max(self._seconds, 1e-3)))
            own = [size, max(1, math.ceil(size / max(1.0, budget))), longest]
        answers = self._group.gather_json(
            [own, self.log.room], fields(optional(fields(whole(), whole(1), whole(1))), whole())
        )
        for owner in self.owners:
            for other in together(self.plan, owner):
                if answers[other][0] is None or answers[other][0][0] > self._most_bytes(other):
                    raise PeerLost(f"rank {other} announced a state that is larger than its layers, or none")
            size, alike = answers[owner][0][0], self.owners if self._alike else together(self.plan, owner)
            steps = max(answers[other][0][1] for other in alike)
            longest = min(answers[other][0][2] for other in alike)
            # Just before a copy is complete, the log reaches back to the beginning of the one before.
            keeping = set[int]().union(*(keepers(self.plan, other, self.ties) for other in alike))
            longest = min([longest, *(answers[keeper][1] // 2 - 1 for keeper in keeping)])
            if steps <= longest:
                self._courses[owner] = _Course(step, size, max(1, steps // _HASTE), steps)
            else:
                self.bare.add(owner)
                self.replicas.pop(owner, None)  # from the beginning of the run, which is ever longer ago
                if owner == self._group.rank:
                    _log.warning(
                        "no other rank keeps a copy of rank %d's state: %.1f MB would take %d steps on this link, and "
                        "only %d can be bridged; raise recovery.mirror_budget or recovery.log_bytes, or choose a plan "
                        "in which several ranks hold every layer", owner, size / 1e6, steps, max(0, longest),
                    )  # fmt: skip

    def _most_bytes(self, owner: int) -> int:
        stages = [self.plan.stages[number] for number in self.plan.stages_of(owner)]
        return self._state.most_bytes(layer for stage in stages for layer in range(stage.start, stage.stop))

    def _slice(self, owner: int, course: _Course, step: int) -> None:
        rank, targets = self._group.rank, self._buddies[owner]
        members = beside(self.plan, owner)
        if rank not in (owner, *targets, *members):
            return
        begin, end = course.slice(step)
        tag = self._group.channel("mirror").tag(owner)
        if course.cycle(step)[1] == 0:
            if rank == owner or rank in members:
                keeps = bool(self.parts or members)
                self._own = self._packer.pack(self._state, None if keeps else self._own)
                if len(self._own) != course.bytes:  # a parameter was first updated after the ranks had agreed on sizes
                    self._own = torch.zeros(course.bytes, dtype=torch.uint8)  # which nobody takes for a state
                if keeps:
                    self._arriving[owner] = self._own
            else:
                self._arriving[owner] = torch.empty(course.bytes, dtype=torch.uint8)
        content = self._own if rank == owner else self._arriving[owner]
        assert content is not None
        to = () if end == begin else targets if rank == owner else [rank] if rank in targets else ()
        for target in to:
            self._works.append(Parcel("", content[begin:end], owner, target).begin(self._group, tag))

    def _finish_slices(self, step: int) -> None:
        """Wait for the slices of the step before, and drop what newer copies make superfluous."""
        self.finish()
        needed = []
        for owner, course in self._courses.items():
            complete = course.complete(step)
            if complete is not None and course.cycle(step)[1] == 0 and owner in self._arriving:
                self.replicas.setdefault(owner, []).append(Replica(owner, complete, self._arriving.pop(owner)))
            # Only once the step before this one has ended everywhere have all ranks seen the copy complete.
            known = course.complete(step - 1) if step > course.start else None
            needed.append(known if known is not None else 0)
            # A copy may be of use only with others of the same step, whose holders may know of an older one only.
            oldest = known if self.parts or self._alike else complete
            kept = [one for one in self.replicas.pop(owner, []) if one.step >= (oldest or 0)]
            self.replicas |= {owner: kept} if kept else {}
        if self._courses or self.bare:
            self.log.forget(min(needed, default=step))

    def report(self) -> Report:
        """Return what this rank could contribute to rebuilding lost owners."""
        return Report({owner: [one.step for one in kept] for owner, kept in self.replicas.items()}, self.log.first)

    def keep_parts(self, state: TrainState) -> None:
        """Count the parts in memory as a copy, now that their group is over: all of its ranks may be back."""
        kept = self.replicas.setdefault(self._group.rank, [])
        if self.parts and self.parts == state.parts and all(one.step < state.step for one in kept):
            content = self._packer.pack(state)
            kept.append(Replica(self._group.rank, state.step, content))

    def replica(self, owner: int, step: int) -> Replica:
        """Return the replica of an owner that was taken at a step. Raises PeerLost."""
        for one in self.replicas.get(owner, []):
            if one.step == step:
                return one
        raise PeerLost(f"the copy of rank {owner}'s state after step {step} is gone")


Ties = Sequence[Sequence[int]]
"""The layers that share a parameter, for each parameter that several layers share."""


@dataclass(frozen=True)
class Replica:
    """Holds the state of an owner as it was at a step; without `content`, that is the initial one."""

    owner: int
    step: int
    content: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name. Raises PeerLost if the owner has not sent what it announced."""
        try:
            return load(self.content.numpy().tobytes()) if self.content is not None else {}
        except SafetensorError as error:
            raise PeerLost(f"the copy of rank {self.owner}'s state cannot be read: {error}") from error


def owners(plan: Plan, mirrors: int = 1) -> dict[int, int]:
    """Return the ranks whose state is mirrored, and to how many ranks, so that as many ranks may be lost at once.

    They are those that alone hold it. Where two ranks may be lost, the first member of every other stage is one, too: a
    stage of two members needs one more copy, and what one of more members has sent may have to be computed again.
    """
    found = {}
    for rank in range(plan.world_size) if plan.world_size > 1 else ():
        stages = [plan.stages[number] for number in plan.stages_of(rank)]
        alone = [stage.splits_channels or len(stage.ranks) == 1 for stage in stages]
        first = [mirrors > 1 and rank == one.ranks[0] and one.sync is Sync.ALL_REDUCE for one in stages]
        if stages and all(one or other for one, other in zip(alone, first, strict=True)):
            found[rank] = max(
                0, *(mirrors if one else mirrors + 1 - len(s.ranks) for one, s in zip(alone, stages, strict=True))
            )
    return found if any(found.values()) else {}


def beside(plan: Plan, owner: int) -> set[int]:
    """Return the members of an owner's stage who keep copies of their own, which are the same; none if it is alone."""
    stages = [plan.stages[number] for number in plan.stages_of(owner)]
    return {rank for stage in stages if not stage.splits_channels and len(stage.ranks) > 1 for rank in stage.ranks}


def together(plan: Plan, owner: int) -> tuple[int, ...]:
    """Return the owners whose copies make up whole layers: the members of a stage that is split, or the owner alone."""
    split = [plan.stages[number] for number in plan.stages_of(owner) if plan.stages[number].splits_channels]
    return split[0].ranks if split else (owner,)


def buddies(plan: Plan, mirrors: int = 1, hosts: Sequence[str] | None = None) -> dict[int, tuple[int, ...]]:
    """Return for each owner the ranks that keep its replicas: at first, a member of the stage after its last one.

    In a stage that is split, that is the next member; if no other rank has layers, it is one without. If the machines
    of the ranks are known, those on other machines than the members of the stage, and than each other, come first.
    """
    counts = owners(plan, mirrors)
    found = {owner: _buddies(plan, owner, count, hosts) for owner, count in counts.items()}
    return {owner: ranks for owner, ranks in found.items() if ranks or not counts[owner]}


def _buddies(plan: Plan, owner: int, count: int, hosts: Sequence[str] | None) -> tuple[int, ...]:
    group = together(plan, owner)
    place = group.index(owner) + 1
    after = (max(plan.stages_of(owner)) + 1) % len(plan.stages)
    members = {rank for number in plan.stages_of(owner) for rank in plan.stages[number].ranks}
    around = [plan.stages[number % len(plan.stages)] for number in range(after, after + len(plan.stages))]
    candidates = [rank for stage in around for rank in stage.ranks if rank not in members]
    others = [rank for rank in (*group[place:], *group[:place], *plan.spare) if rank != owner]
    candidates = list(dict.fromkeys([*candidates, *others]))
    used = [owner] if len(group) > 1 else sorted(members)  # whose machines others are better than
    chosen: list[int] = []
    while candidates and len(chosen) < count:
        taken = {hosts[rank] for rank in (*used, *chosen)} if hosts is not None else set()
        chosen.append(min(candidates, key=lambda rank: hosts is not None and hosts[rank] in taken))
        candidates.remove(chosen[-1])
    return tuple(chosen)


def keepers(plan: Plan, owner: int, ties: Ties = ()) -> set[int]:
    """Return the ranks that send messages to an owner: the members of the neighbouring stages.

    Where layers share parameters (each of the `ties` lists such layers), the members of these layers' stages send
    gradients to each other. A stage that is split is the only one of its plan, so its members need no messages but the
    samples.
    """
    own = plan.stages_of(owner)
    beside = {number + step for number in own for step in (-1, 1)}
    for layers in ties:
        sharing = {plan.stage_of(layer) for layer in layers}
        if sharing & set(own):
            beside |= sharing
    return {rank for number in beside if 0 <= number < len(plan.stages) for rank in plan.stages[number].ranks} - {owner}


@dataclass(frozen=True)
class Rebuild:
    """Tells how stages are rebuilt. Ranks are those of the group that was lost."""

    owners: tuple[int, ...]  # whose copies make up the layers
    ranks: tuple[int, ...]  # whose work is repeated
    step: int  # of the copies
    builder: int
    copies: tuple[int, ...]  # the rank that the builder has each owner's copy from
    keepers: tuple[int, ...]  # the ranks that have messages to the owners

    @property
    def sources(self) -> list[int]:
        """Return the ranks that have something the builder needs."""
        return sorted({*self.copies, *self.keepers})


def rebuilds(
    plan: Plan, missing: list[int], reports: Mapping[int, Report], ties: Ties = (), mirrors: int = 1
) -> list[Rebuild] | None:
    """Return how to rebuild the missing layers, or None if it cannot be done.

    `reports[r]` is the report of rank r of the group that was lost, if it survived.
    """
    gone = [number for number, stage in enumerate(plan.stages) if {*range(stage.start, stage.stop)} & {*missing}]
    found: list[Rebuild] = []
    for number in gone:
        if any(set(plan.stages[number].ranks) & set(one.ranks) for one in found):
            continue
        one = _rebuild(plan, number, reports, ties, mirrors)
        if one is None:
            return None
        found.append(one)
    return found


def _rebuild(plan: Plan, number: int, reports: Mapping[int, Report], ties: Ties, mirrors: int) -> Rebuild | None:
    """Return how to rebuild a stage, together with others that were lost, or that sent messages which were lost."""
    ranks = set(plan.stages[number].ranks)
    while True:
        numbers = {number for rank in ranks for number in plan.stages_of(rank)}
        members = {rank for number in numbers for rank in plan.stages[number].ranks}
        sources = set[int]().union(*(keepers(plan, rank, ties) for rank in members)) - members
        if ranks == members and sources <= reports.keys():
            break
        ranks = members | (sources - reports.keys())
    owning = [owner for owner in buddies(plan, mirrors) if owner in ranks]
    if numbers != {number for owner in owning for number in plan.stages_of(owner)}:
        return None  # nobody keeps copies of some of them
    having = [
        {(step, rank) for rank, report in reports.items() for step in report.replicas.get(owner, [])}
        for owner in owning
    ]
    steps = set.intersection(*({step for step, _ in there} for there in having))
    if not steps:
        return None
    step = max(steps)
    holders = [[rank for at, rank in sorted(there) if at == step] for there in having]
    # An initial state is known to all, and a copy to its buddies only, which therefore come first.
    able = sorted(set().union(*holders))
    first = next((one for owner in owning for one in buddies(plan, mirrors)[owner]), None)
    builder = max(able, key=lambda rank: (sum(rank in there for there in holders), rank == first))
    logs = [reports[rank].log for rank in sources]
    if any(log is None or log > step for log in logs):
        return None
    copies = tuple(builder if builder in there else there[0] for there in holders)
    return Rebuild(tuple(owning), tuple(sorted(ranks)), step, builder, copies, tuple(sorted(sources)))
