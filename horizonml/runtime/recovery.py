"""Brings the state in the ranks' memory to a new group and its plan, and prepares for the next loss.

It also rebuilds the layers that only lost ranks held, from their replicas and the messages that were sent to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor

from horizonml.comm.expected import boolean, fields, items, mapping, number, optional, text, whole
from horizonml.comm.group import Group
from horizonml.comm.work import Messages, Work
from horizonml.data.choose import load
from horizonml.data.dataset import DataInfo
from horizonml.data.sampler import sampler_for
from horizonml.engine.session import Trainer, replay
from horizonml.errors import HorizonError, PeerLost, is_out_of_memory
from horizonml.files import cache_folder
from horizonml.job.schema import Job
from horizonml.machine.resources import memory_left
from horizonml.plan.plan import Plan, Stage
from horizonml.profiling.probe import probe_network
from horizonml.runtime.agreement import Measured
from horizonml.runtime.joining import Place, who_follows
from horizonml.runtime.life import Last, Life
from horizonml.runtime.trainer import training_batch
from horizonml.state.mirror import Mirror, Rebuild, Replica, buddy, owners, rebuilds, together
from horizonml.state.move import holders, move, senders
from horizonml.state.optim import learning_rate
from horizonml.state.parts import joined, name_of
from horizonml.state.resume import Recovery
from horizonml.state.train_state import TrainState
from horizonml.tasks.choose import task_for
from horizonml.tasks.task import Batch
from horizonml.telemetry.record import Source
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


_ASSUMED_BANDWIDTH = 100e6  # bytes per second of a link that was not measured: about a gigabit
_MIRROR_SHARE = 0.5  # of the memory that is left when training begins; activations and gradients take the rest
_LOG_SHARE = 0.2  # likewise, for the messages that a rank keeps


def recover(
    life: Life, info: DataInfo, found: Recovery, plan: Plan, place: Place
) -> tuple[Source | None, frozenset[int]]:
    """Bring the state that ranks have in memory to a plan; all ranks of the group call this.

    Return where the state was taken from, or None if it is not complete, and the ranks that are to follow the others
    until they have it, too. Raises PeerLost.
    """
    state, source = life.state, Source.MEMORY
    assert state is not None
    if found.missing:
        rebuilt = rebuild(life.job, info, state, life.last, found, place.group, place.started_as)
        if isinstance(rebuilt, str):
            place.say(f"the state of step {found.step} cannot be completed without the lost ranks: {rebuilt}")
            state.drop()
            return None, frozenset()
        found, source = rebuilt, Source.REPLICA
    if state.parts:
        state.keep([])  # parts of a group that is over are no layers
    moves = senders(found.holders, plan)
    following = who_follows(state, moves, found, plan, place)
    move(state, [one for one in moves if one[2] not in following], place.group)
    if place.group.rank in following:
        state.drop()
    state.step, state.valid = found.step, place.group.rank not in following
    return source, following


def hand_over(state: TrainState, plan: Plan, group: Group, leaves: bool) -> None:
    """Bring the layers that only leaving ranks hold to ranks that stay, and make whole what the members had split.

    All ranks call this, without a session. Raises PeerLost.
    """
    told = group.gather_json([leaves, state.valid], fields(boolean, boolean))
    leaving = [rank for rank, (gone, _) in enumerate(told) if gone]
    staying = [rank for rank in range(group.world_size) if rank not in leaving]
    if not staying:
        return
    state.join(group)
    if not state.valid:  # this rank follows; whatever it is handed is valid, and all it has
        state.drop()
        state.valid = True
    plan = plan.without([rank for rank, (_, valid) in enumerate(told) if not valid])
    last = [(layer, ranks[0]) for layer, ranks in enumerate(holders(plan)) if all(rank in leaving for rank in ranks)]
    move(state, [(layer, rank, staying[n % len(staying)]) for n, (layer, rank) in enumerate(last)], group)


def known(life: Life, started_as: Sequence[int]) -> Measured | None:
    """Return what an earlier group has measured, if that includes all ranks of this one."""
    if life.measured is None or not set(started_as) <= set(life.measured_for):
        return None
    return life.measured.among([life.measured_for.index(rank) for rank in started_as])


def mirror_for(life: Life, session: Trainer, place: Place) -> Mirror | None:
    """Return what copies the state of ranks to each other's memory, if the plan needs that and there is room for it.

    All ranks of the group call this.
    """
    recovery, group, plan = life.job.recovery, session.group, session.plan
    group.log = None  # drops that of an earlier plan
    if not recovery.mirror or not owners(plan):
        return None
    left = memory_left(processes=group.hosts.count(group.hosts[group.rank]))
    size = session.state.bytes() if group.rank in owners(plan) else 0
    measured = known(life, place.started_as)
    spare = group.gather_json([size, left, measured is not None], fields(whole(), number, boolean))
    short = crowded(plan, [size for size, *_ in spare], [room for _, room, _ in spare], group.hosts)
    if short is not None:
        rank, needed = short
        place.say(
            f"warning: ranks keep no copies of each other's state: rank {rank} would need {human_bytes(needed)} "
            f"for them, with {human_bytes(spare[rank][1])} left. If a rank is lost that alone holds some "
            "state, all go on from a checkpoint (recovery.mirror: false turns copies and this warning off)"
        )
        return None
    assumed = _ASSUMED_BANDWIDTH
    if not all(knows for *_, knows in spare) and len(set(group.hosts)) > 1:
        # Copies that are sent too fast fill a slow link, and the messages of steps wait behind them.
        assumed = min(assumed, probe_network(group).bandwidth)

    def speed(to: int) -> float:
        return measured.network.between(group.rank, to).bandwidth if measured is not None else assumed

    log_bytes = min(recovery.log_bytes, int(left * _LOG_SHARE))
    return Mirror(plan, session.state, group, speed, recovery.mirror_budget, log_bytes)


def crowded(
    plan: Plan, state_bytes: Sequence[int], left: Sequence[float], hosts: Sequence[str] | None = None
) -> tuple[int, int] | None:
    """Return a rank that has too little memory for mirroring, and the bytes that it would need; None if there is none.

    An owner holds the copy that it sends. Its buddy holds the replica, and the next one, which is arriving. Where the
    members of a stage split channels, owner and buddy both hold one more, and the owner its replica, too.
    """
    buddies = {owner: buddy(plan, owner, hosts) for owner in owners(plan)}
    split = {owner for owner in buddies if len(together(plan, owner)) > 1}
    needed = [
        (3 if rank in split else 1) * state_bytes[rank]
        + sum((3 if owner in split else 2) * state_bytes[owner] for owner in buddies if buddies[owner] == rank)
        for rank in range(plan.world_size)
    ]
    worst = max(range(plan.world_size), key=lambda rank: needed[rank] / max(1.0, left[rank]))
    return (worst, needed[worst]) if needed[worst] > left[worst] * _MIRROR_SHARE else None
