"""Rebuilds the layers that only lost ranks held, from their replicas and the messages that were sent to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor

from horizonml.comm.group import Group, Work
from horizonml.data.choose import load
from horizonml.data.dataset import DataInfo
from horizonml.data.sampler import Sampler
from horizonml.engine.replay import Messages, replay
from horizonml.errors import HorizonError, PeerLost
from horizonml.files import cache_folder
from horizonml.job.schema import Job
from horizonml.runtime.life import Last
from horizonml.runtime.trainer import training_batch
from horizonml.state.mirror import Mirror, Rebuild, rebuilds
from horizonml.state.optim import learning_rate
from horizonml.state.recover import Recovery
from horizonml.state.train_state import TrainState
from horizonml.tasks.choose import task_for
from horizonml.tasks.task import Batch


def rebuild(
    job: Job, info: DataInfo, state: TrainState, lost: Last | None, found: Recovery, group: Group, members: list[int]
) -> Recovery | str:
    """Return where to go on from once the missing layers have been rebuilt, or why they cannot be.

    All ranks of the new group call this; `members` are its ranks as they were started. Raises PeerLost.
    """
    reports = group.gather_json([lost.generation, lost.mirror.report()] if lost is not None else None)
    last = max((report[0] for report in reports if report is not None), default=None)
    survivors = [rank for rank, report in enumerate(reports) if report is not None and report[0] == last]
    if not survivors:
        return "no rank that is left keeps copies of the others' state"
    plans: list[Any] | None = None
    if group.rank == survivors[0]:
        assert lost is not None
        place = {lost.members.index(members[rank]): rank for rank in survivors}
        chosen = rebuilds(lost.mirror.plan, found.missing, {old: reports[rank][1] for old, rank in place.items()})
        if chosen is not None:
            plans = [[one.owner, one.step, place[one.builder], [[r, place[r]] for r in one.keepers]] for one in chosen]
    plans = group.broadcast(plans, survivors[0])
    if plans is None:
        return "a rank and the copy of its state were lost together, or the copy cannot be used"
    holders = [list(ranks) for ranks in found.holders]
    for owner, since, builder, keepers in plans:
        part = _Part(Rebuild(owner, since, builder, tuple(old for old, _ in keepers)), dict(keepers), found.step)
        problem = part.run(job, info, state, lost, group)
        if problem is not None:
            return problem
    held = group.gather_json(state.layers())
    for layer in found.missing:
        holders[layer] = [rank for rank, layers in enumerate(held) if layer in layers]
    done = Recovery(found.step, holders)
    return done if not done.missing else f"layers {done.missing} could not be rebuilt"


@dataclass(frozen=True)
class _Part:
    """Rebuilds the stages of one lost rank; `places` are the keepers' ranks in the new group, by their old ones."""

    how: Rebuild
    places: dict[int, int]
    until: int

    def run(self, job: Job, info: DataInfo, state: TrainState, lost: Last | None, group: Group) -> str | None:
        """Bring the messages to the builder, which repeats the work on them; return what went wrong, on all ranks."""
        mine = next((old for old, new in self.places.items() if new == group.rank), None)
        kept: dict[tuple[int, int], Tensor] = {}
        if mine is not None:
            assert lost is not None
            kept = lost.mirror.log.messages(self.how.owner, self.how.step, self.until)
        content = serialise({f"{step}/{tag}": tensor.clone() for (step, tag), tensor in kept.items()})
        sizes = group.gather_json(len(content))
        received = {}
        tag = group.channel("mirror").tag(group.world_size + self.how.owner)
        works: list[tuple[Work, int, Tensor]] = []
        if group.rank == self.how.builder:
            for old, new in self.places.items():
                if new == group.rank:
                    received[old] = kept
                else:
                    into = torch.empty(int(sizes[new]), dtype=torch.uint8)
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
                self._repeat(job, info, state, lost.mirror, received)
            except HorizonError as error:
                problem = f"repeating the steps of a lost rank failed: {error}"
        return next((text for text in group.gather_json(problem) if text is not None), None)

    def _repeat(
        self,
        job: Job,
        info: DataInfo,
        state: TrainState,
        mirror: Mirror,
        received: dict[int, dict[tuple[int, int], Tensor]],
    ) -> None:
        """Repeat the lost rank's work since its replica, and take over its layers. Raises HorizonError."""
        owner, plan = self.how.owner, mirror.plan
        theirs = TrainState(state.model, job.optimizer, job.ema)
        theirs.put(mirror.replicas[owner].tensors())
        theirs.step = self.how.step
        stages = plan.stages_of(owner)
        data = load(job.data, info, cache_folder() / "data", inputs=0 in stages, targets=len(plan.stages) - 1 in stages)
        sampler = Sampler(info.train, job.batch_size, job.seed)

        def steps() -> Iterator[tuple[Messages, Batch, float, float]]:
            for step in range(self.how.step, self.until):
                messages = {
                    (old, tag): tensor
                    for old, kept in received.items()
                    for (number, tag), tensor in kept.items()
                    if number == step
                }
                batch = training_batch(job, data, sampler, *divmod(step, sampler.steps_per_epoch))
                per_epoch = sampler.steps_per_epoch
                total = job.total_steps(per_epoch)
                rate = learning_rate(job.lr_schedule, job.optimizer.lr, step, per_epoch, total)
                yield messages, batch, rate, state.scales.of(step) if job.optimizer.clip_norm is not None else 1.0

        replay(plan, owner, theirs, steps(), task_for(job, info), job.batch_size)
        state.put(theirs.tensors())


def _parse(content: Tensor) -> dict[tuple[int, int], Tensor]:
    """Return the messages that a keeper sent, by step and tag. Raises PeerLost."""
    try:
        found = parse(content.numpy().tobytes())
        return {(int(name.partition("/")[0]), int(name.partition("/")[2])): value for name, value in found.items()}
    except Exception as error:
        raise PeerLost(f"a rank sent messages that cannot be read ({error})") from error
