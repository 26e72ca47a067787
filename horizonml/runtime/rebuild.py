"""Rebuilds the layers that only lost ranks held, from their replicas and the messages that were sent to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor

from horizonml.comm.expected import fields, items, mapping, number, optional, text, whole
from horizonml.comm.group import Group
from horizonml.comm.work import Work
from horizonml.data.choose import load
from horizonml.data.dataset import DataInfo
from horizonml.data.sampler import sampler_for
from horizonml.engine.replay import Messages, replay
from horizonml.errors import HorizonError, PeerLost, is_out_of_memory
from horizonml.files import cache_folder
from horizonml.job.schema import Job
from horizonml.machine.resources import memory_left
from horizonml.plan.plan import Plan, Stage
from horizonml.runtime.life import Last
from horizonml.runtime.trainer import training_batch
from horizonml.state.mirror import Mirror
from horizonml.state.optim import learning_rate
from horizonml.state.parts import joined, name_of
from horizonml.state.recover import Recovery
from horizonml.state.replicas import Rebuild, Replica, rebuilds
from horizonml.state.train_state import TrainState
from horizonml.tasks.choose import task_for
from horizonml.tasks.task import Batch
from horizonml.text import human_bytes

_MOST_RANKS = 4096
_COPY = "copy"  # begins the names of copies, whereas the names of messages begin with a step


def rebuild(
    job: Job, info: DataInfo, state: TrainState, lost: Last | None, found: Recovery, group: Group, members: list[int]
) -> Recovery | str:
    """Return where to go on from once the missing layers have been rebuilt, or why they cannot be.

    All ranks of the new group call this; `members` are its ranks as they were started. Raises PeerLost.
    """
    if lost is not None and set(lost.members) <= set(members):
        lost.mirror.keep_parts(state)  # the group has broken, but perhaps nothing is lost
    own = [lost.generation, lost.mirror.report()] if lost is not None else None
    reports = group.gather_json(own, optional(fields(whole(), _report)))
    last = max((report[0] for report in reports if report is not None), default=None)
    survivors = [rank for rank, report in enumerate(reports) if report is not None and report[0] == last]
    if not survivors:
        return "no rank that is left keeps copies of the others' state"
    plans: list[Any] | None = None
    if group.rank == survivors[0]:
        assert lost is not None
        place = {lost.members.index(members[rank]): rank for rank in survivors}
        kept = {old: reports[rank][1] for old, rank in place.items()}
        chosen = rebuilds(lost.mirror.plan, found.missing, kept, lost.mirror.ties)
        if chosen is not None:
            plans = []
            for one in chosen:
                places = [[old, place[old]] for old in one.sources]
                plans.append([one.owners, one.step, place[one.builder], one.copies, one.keepers, places])
    plans = group.broadcast(plans, survivors[0], optional(items(_rebuild_for(group.world_size, found.step))))
    if plans is None:
        return "a rank and the copy of its state were lost together, or the copy cannot be used"
    holders = [list(ranks) for ranks in found.holders]
    for how, places in plans:
        part = _Part(how, places, found.step)
        problem = part.run(job, info, state, lost, group)
        if problem is not None:
            return problem
    held = group.gather_json(state.layers(), items(whole()))
    for layer in found.missing:
        holders[layer] = [rank for rank, layers in enumerate(held) if layer in layers]
    done = Recovery(found.step, holders)
    return done if not done.missing else f"layers {done.missing} could not be rebuilt"


def _report(value: Any) -> dict[str, Any]:
    """Return what a rank could contribute, as `Mirror.report` says it."""
    log = optional(whole())(value["log"])
    return {"replicas": mapping(items(whole()))(value["replicas"]), "log": log}


def _rebuild_for(world_size: int, until: int) -> Callable[[Any], tuple[Rebuild, dict[int, int]]]:
    """Return a reader of how a lost rank's layers are rebuilt, and where the sources are in the new group."""
    new, old = whole(0, world_size - 1), whole(0, _MOST_RANKS)
    every = fields(items(old), whole(0, until), new, items(old), items(old), items(fields(old, new)))

    def read(value: Any) -> tuple[Rebuild, dict[int, int]]:
        owners, step, builder, copies, keepers, places = every(value)
        how = Rebuild(tuple(owners), step, builder, tuple(copies), tuple(keepers))
        if not owners or len(copies) != len(owners) or {*how.sources} != {source for source, _ in places}:
            raise ValueError("the ranks that rebuild do not fit together")
        return how, dict(places)

    return read


@dataclass(frozen=True)
class _Part:
    """Rebuilds the stages of lost owners; `places` are the sources' ranks in the new group, by their old ones.

    `how.builder`, too, is a rank of the new group; all other ranks in `how` are those of the old one.
    """

    how: Rebuild
    places: dict[int, int]
    until: int

    def run(self, job: Job, info: DataInfo, state: TrainState, lost: Last | None, group: Group) -> str | None:
        """Bring copies and messages to the builder, which repeats the work; return what went wrong, on all ranks."""
        mine = next((old for old, new in self.places.items() if new == group.rank), None)
        kept: dict[str, Tensor] = {}
        if mine is not None:
            assert lost is not None
            kept = self._kept(mine, lost.mirror)
        content = serialise(kept) if group.rank != self.how.builder else b""
        sizes = group.gather_json(len(content), whole())
        self._check_room(sizes, group)
        received = {}
        tag = group.channel("mirror").tag(group.world_size + self.how.owners[0])
        works: list[tuple[Work, int, Tensor]] = []
        if group.rank == self.how.builder:
            for old, new in self.places.items():
                if new == group.rank:
                    received[old] = kept
                else:
                    into = torch.empty(sizes[new], dtype=torch.uint8)
                    works.append((group.receive(into, new, tag), new, into))
        elif mine is not None:
            out = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            works.append((group.send(out, self.how.builder, tag), self.how.builder, out))
        for work, peer, _ in works:
            group.wait(work, peer)
        problem = None
        if group.rank == self.how.builder:
            old_of = {new: old for old, new in self.places.items()}
            for _, peer, into in works:
                received[old_of[peer]] = _parse(into)
            assert lost is not None
            try:
                self._repeat(job, info, state, lost, received)
            except Exception as error:
                if not isinstance(error, HorizonError) and not is_out_of_memory(error):
                    raise
                problem = f"repeating the steps of a lost rank failed: {error}"
        return next((said for said in group.gather_json(problem, optional(text)) if said is not None), None)

    def _check_room(self, sizes: list[int], group: Group) -> None:
        """Raise PeerLost on all ranks unless the builder has memory for what the others announce, twice over."""
        announced = 2 * sum(sizes[new] for new in self.places.values())  # once more when it is read
        left = group.gather_json(memory_left(processes=group.hosts.count(group.hosts[group.rank])), number)
        if announced > left[self.how.builder]:
            raise PeerLost(
                f"ranks announced {human_bytes(announced / 2)} to rebuild a lost rank's layers on rank "
                f"{self.how.builder}, which has {human_bytes(left[self.how.builder])} of memory left"
            )

    def _kept(self, mine: int, mirror: Mirror) -> dict[str, Tensor]:
        """Return what this rank, `mine` in the old group, has for the builder: copies, and messages by step and tag."""
        how, kept = self.how, dict[str, Tensor]()
        if mine in how.keepers:
            messages = mirror.log.messages(how.owners[0], how.step, self.until)
            kept = {f"{step}/{tag}": tensor.clone() for (step, tag), tensor in messages.items()}
        for owner, rank in zip(how.owners, how.copies, strict=True):
            content = mirror.replica(owner, how.step).content if rank == mine else None
            if content is not None:  # the initial state is known to all
                kept[f"{_COPY}/{owner}"] = content
        return kept

    def _repeat(
        self, job: Job, info: DataInfo, state: TrainState, lost: Last, received: dict[int, dict[str, Tensor]]
    ) -> None:
        """Repeat the lost owners' work since their copies, and take over their layers. Raises HorizonError.

        Layers run as they do on this rank, which is as they ran on a lost one of the same kind.
        """
        mirror = lost.mirror
        plan, rank = self._alone(mirror.plan)
        theirs = TrainState(state.model, job.optimizer, job.ema, device=state.device)
        theirs.put(self._copied(theirs, mirror, received))
        theirs.step = self.how.step
        stages = plan.stages_of(rank)
        messages = _messages(received)
        data = load(job.data, info, cache_folder() / "data", inputs=0 in stages, targets=len(plan.stages) - 1 in stages)
        sampler = sampler_for(info, job.batch_size, job.seed)

        def steps() -> Iterator[tuple[Messages, Batch, float, float]]:
            for step in range(self.how.step, self.until):
                batch = training_batch(job, data, sampler, *divmod(step, sampler.steps_per_epoch))
                per_epoch = sampler.steps_per_epoch
                total = job.total_steps(per_epoch)
                rate = learning_rate(job.lr_schedule, job.optimizer.lr, step, per_epoch, total)
                scale = state.scales.of(step) if job.optimizer.clip_norm is not None else 1.0
                yield messages.get(step, {}), batch, rate, scale

        replay(plan, rank, theirs, steps(), task_for(job, info), job.batch_size, lost.executions)
        if mirror.parts:
            state.become(theirs.tensors())  # its own parts are among them
        else:
            state.put(theirs.tensors())

    def _alone(self, plan: Plan) -> tuple[Plan, int]:
        """Return the plan by which one rank repeats the owners' work, and its number in that plan."""
        if len(self.how.owners) == 1:
            return plan, self.how.owners[0]
        # A stage that is split is the only one. Which rows are in which micro-batch matters to BatchNorm.
        (stage,) = plan.stages
        return replace(plan, stages=(Stage(stage.start, stage.stop, (0,), (1.0,)),)), 0

    def _copied(self, theirs: TrainState, mirror: Mirror, received: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors that the owners' copies hold. Raises PeerLost if they do not fit the model."""
        copies = {}
        for owner, rank in zip(self.how.owners, self.how.copies, strict=True):
            content = received[rank].get(f"{_COPY}/{owner}")
            copies[owner] = Replica(owner, self.how.step, content).tensors()
        found = joined(mirror.parts, copies)
        layers = theirs.model.parameter_names()
        there = {layers[name_of(key)] for key in found if name_of(key) in layers}
        expected = {key: like for layer in there for key, like in theirs.expected(layer).items()}
        for key, tensor in found.items():
            if key not in expected or (tensor.shape, tensor.dtype) != (expected[key].shape, expected[key].dtype):
                raise PeerLost(f"the copy of {key} does not fit the model")
        return found


def _parse(content: Tensor) -> dict[str, Tensor]:
    """Return what a rank sent. Raises PeerLost."""
    try:
        return parse(content.numpy().tobytes())
    except SafetensorError as error:
        raise PeerLost(f"a rank sent messages that cannot be read ({error})") from error


def _messages(received: Mapping[int, Mapping[str, Tensor]]) -> dict[int, dict[tuple[int, int], Tensor]]:
    """Return the messages among what ranks sent, for each step by sender and tag. Raises PeerLost."""
    found: dict[int, dict[tuple[int, int], Tensor]] = defaultdict(dict)
    for sender, kept in received.items():
        for name, tensor in kept.items():
            step, _, tag = name.partition("/")
            if step == _COPY:
                continue
            try:
                found[int(step)][sender, int(tag)] = tensor
            except ValueError as error:
                raise PeerLost(f"rank {sender} sent a message named {name!r}") from error
    return found
