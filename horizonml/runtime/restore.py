"""Restores the state when a group begins: from the ranks' memory, from a checkpoint, or to step 0.

Layers that only lost ranks held are rebuilt from their replicas and from the messages that were sent to those ranks
since. Before the group trains, it prepares for the next loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor

from horizonml.comm.expected import AsJson, fields, items, number, optional, text, whole
from horizonml.comm.group import Group
from horizonml.comm.playback import Messages
from horizonml.data.choose import load
from horizonml.data.dataset import DataInfo
from horizonml.data.sampler import sampler_for
from horizonml.engine.session import Trainer, replay
from horizonml.errors import HorizonError, PeerLost, is_out_of_memory
from horizonml.files import cache_folder
from horizonml.job.schema import Job
from horizonml.plan.plan import Plan, Stage
from horizonml.profiling.probe import probe_network
from horizonml.runtime.life import Last, Life
from horizonml.runtime.trainer import training_batch
from horizonml.state.carry import Parcel, carry, memory_here, move, senders
from horizonml.state.checkpoint import Checkpoints
from horizonml.state.follow import who_follows
from horizonml.state.mirror import Mirror, Rebuild, Replica, Report, beside, buddies, owners, rebuilds, together
from horizonml.state.optim import learning_rate
from horizonml.state.parts import joined, name_of
from horizonml.state.resume import Recovery
from horizonml.state.train_state import TrainState
from horizonml.tasks.choose import task_for
from horizonml.tasks.task import Batch
from horizonml.telemetry.record import StateSource
from horizonml.text import human_bytes

Say = Callable[[str], None]  # tells the user, on rank 0
_COPY = "copy"  # begins the names of copies, whereas the names of messages begin with a step


@dataclass(frozen=True)
class Copies:
    """What a rank kept of other ranks' state in the group that it was in before."""

    generation: int
    members: list[int]  # of that group, as they were started
    plan: Annotated[Plan, AsJson(Plan)]
    mirrors: int
    report: Report

    @classmethod
    def of(cls, last: Last) -> Copies:
        """Return what this rank kept."""
        return cls(last.generation, last.members, last.mirror.plan, last.mirror.mirrors, last.mirror.report())


def rebuild(
    job: Job,
    info: DataInfo,
    state: TrainState,
    lost: Last | None,
    found: Recovery,
    group: Group,
    copies: Sequence[Copies | None],
) -> Recovery | str:
    """Return where to go on from once the missing layers have been rebuilt, or why they cannot be.

    All ranks of the new group call this; `copies` are what each of them has. Raises PeerLost.
    """
    parts = _parts(state, found, group.started_as, copies)
    if isinstance(parts, str):
        return parts
    kept = [part.kept(lost, group.rank) for part in parts]
    contents = [serialise(own) if group.rank != part.builder else b"" for part, own in zip(parts, kept, strict=True)]
    told = group.gather_json([list(map(len, contents)), memory_here(group)], fields(items(whole()), number))
    _check_room(parts, told)
    parcels = []
    for index, part in enumerate(parts):
        for old, new in part.places.items():
            if new == part.builder or group.rank not in (new, part.builder):
                continue
            if group.rank == new:
                content = torch.frombuffer(bytearray(contents[index]), dtype=torch.uint8)
            else:
                content = torch.empty(told[new][0][index], dtype=torch.uint8)
            parcels.append(Parcel(f"{index}/{old}", content, new, part.builder))
    arrived = carry(parcels, group, "mirror")
    problem = None
    for index, (part, own) in enumerate(zip(parts, kept, strict=True)):
        if group.rank == part.builder and problem is None:
            assert lost is not None
            received = {
                old: _parse(arrived[f"{index}/{old}"]) if new != group.rank else own for old, new in part.places.items()
            }
            problem = part.repeat(job, info, state, lost, received)
    held = group.gather_json([problem, state.layers()], fields(optional(text), items(whole())))
    for said, _ in held:
        if said is not None:
            return str(said)
    holders = [list(ranks) for ranks in found.holders]
    for layer in found.missing:
        holders[layer] = [rank for rank, (_, layers) in enumerate(held) if layer in layers]
    done = Recovery(found.step, holders)
    return done if not done.missing else f"layers {done.missing} could not be rebuilt"


def _parts(
    state: TrainState, found: Recovery, members: Sequence[int], copies: Sequence[Copies | None]
) -> list[_Part] | str:
    """Return how the missing layers are rebuilt, or why they cannot be; all ranks return the same. Raises PeerLost."""
    last = max((one.generation for one in copies if one is not None), default=None)
    survivors = {rank: one for rank, one in enumerate(copies) if one is not None and one.generation == last}
    if not survivors:
        return "no rank that is left keeps copies of the others' state"
    first = survivors[min(survivors)]
    if any(
        replace(one, report=first.report) != first or members[rank] not in one.members
        for rank, one in survivors.items()
    ):
        raise PeerLost("the ranks of the group that was lost do not agree on its members and its plan")
    first.plan.check(len(state.model.chain), len(first.members))
    places = {first.members.index(members[rank]): rank for rank in survivors}
    reports = {old: survivors[rank].report for old, rank in places.items()}
    ties = [[state.layer_of(f"model/{name}") for name in names] for names in state.model.ties]
    chosen = rebuilds(first.plan, found.missing, reports, ties, first.mirrors)
    if chosen is None or any(not 0 <= one.step <= found.step for one in chosen):
        return "a rank and the copy of its state were lost together, or the copy cannot be used"
    missing = frozenset(found.missing)
    return [_Part(one, {old: places[old] for old in one.sources}, found.step, missing) for one in chosen]


def _check_room(parts: Sequence[_Part], told: Sequence[Sequence[Any]]) -> None:
    """Raise PeerLost on all ranks unless builders have memory for what the others announce, twice over.

    `told[r]` is the bytes that rank r has for each part, and the bytes that are left there.
    """
    announced = dict.fromkeys((part.builder for part in parts), 0)
    for index, part in enumerate(parts):
        announced[part.builder] += sum(told[new][0][index] for new in part.places.values())
    for builder, size in announced.items():
        if 2 * size > told[builder][1]:  # once more when it is read
            raise PeerLost(
                f"ranks announced {human_bytes(size)} to rebuild a lost rank's layers on rank {builder}, which has "
                f"{human_bytes(told[builder][1])} of memory left"
            )


@dataclass(frozen=True)
class _Part:
    """Rebuilds the stages of lost owners.

    Ranks in `how` are those of the lost group, and `places` are those of its sources in the new one.
    """

    how: Rebuild
    places: dict[int, int]
    until: int
    missing: frozenset[int]  # layers

    @property
    def builder(self) -> int:
        """Return the rank of the new group that repeats the work."""
        return self.places[self.how.builder]

    def kept(self, lost: Last | None, rank: int) -> dict[str, Tensor]:
        """Return what this rank has for the builder: copies of owners, and messages by step and tag."""
        mine = next((old for old, new in self.places.items() if new == rank), None)
        if mine is None:
            return {}
        assert lost is not None
        how, mirror, kept = self.how, lost.mirror, dict[str, Tensor]()
        for receiver in how.ranks if mine in how.keepers else ():
            messages = mirror.log.messages(receiver, how.step, self.until)
            kept |= {f"{step}/{receiver}/{tag}": tensor.clone() for (step, tag), tensor in messages.items()}
        for owner, holder in zip(how.owners, how.copies, strict=True):
            content = mirror.replica(owner, how.step).content if holder == mine else None
            if content is not None:  # the initial state is known to all
                kept[f"{_COPY}/{owner}"] = content
        return kept

    def repeat(
        self, job: Job, info: DataInfo, state: TrainState, lost: Last, received: dict[int, dict[str, Tensor]]
    ) -> str | None:
        """Repeat the owners' work, on the builder; return what went wrong."""
        try:
            self._repeat(job, info, state, lost, received)
        except Exception as error:
            if not isinstance(error, HorizonError) and not is_out_of_memory(error):
                raise
            return f"repeating the steps of a lost rank failed: {error}"
        return None

    def _repeat(
        self, job: Job, info: DataInfo, state: TrainState, lost: Last, received: dict[int, dict[str, Tensor]]
    ) -> None:
        """Repeat the lost ranks' work since their copies, and take over the owners' layers. Raises HorizonError.

        Layers run as they do on this rank, which is as they ran on a lost one of the same kind.
        """
        mirror = lost.mirror
        plan, ranks = self._alone(mirror.plan)
        model, states = state.model, dict[int, TrainState]()
        whole = TrainState(model, job.optimizer, job.ema, device=state.device)
        copied = self._copied(whole, mirror, received)
        for rank in ranks:
            held = [plan.stages[number] for number in plan.stages_of(rank)]
            layers = {layer for stage in held for layer in range(stage.start, stage.stop)}
            states[rank] = TrainState(model, job.optimizer, job.ema, device=state.device)
            states[rank].put({key: value.clone() for key, value in copied.items() if whole.layer_of(key) in layers})
            states[rank].step = self.how.step
        messages, last = _messages(received), len(plan.stages) - 1
        needed = {number for rank in ranks for number in plan.stages_of(rank)}
        data = load(job.data, info, cache_folder() / "data", inputs=0 in needed, targets=last in needed)
        sampler = sampler_for(info, job.batch_size, job.seed)

        def steps(rank: int) -> Iterator[tuple[Messages, Batch, float, float]]:
            for step in range(self.how.step, self.until):
                batch = training_batch(job, data, sampler, *divmod(step, sampler.steps_per_epoch))
                per_epoch = sampler.steps_per_epoch
                total = job.total_steps(per_epoch)
                rate = learning_rate(job.lr_schedule, job.optimizer.lr, step, per_epoch, total)
                scale = state.scales.of(step) if job.optimizer.clip_norm is not None else 1.0
                yield messages.get((rank, step), {}), batch, rate, scale

        replay(plan, states, steps, task_for(job, info), job.batch_size, lost.execution)
        if mirror.parts:
            state.become(states[0].tensors())  # its own parts are among them
            return
        for rank in set(ranks) & set(self.how.owners):
            there = states[rank].tensors().items()
            state.put({key: value for key, value in there if states[rank].layer_of(key) in self.missing})

    def _alone(self, plan: Plan) -> tuple[Plan, tuple[int, ...]]:
        """Return the plan by which this rank repeats the work, and its ranks: a stage that is split has one then."""
        if not any(stage.splits_channels for stage in plan.stages):
            return plan, self.how.ranks
        # A stage that is split is the only one. Which rows are in which micro-batch matters to BatchNorm.
        (stage,) = plan.stages
        return replace(plan, stages=(Stage(stage.start, stage.stop, (0,), (1.0,)),)), (0,)

    def _copied(self, theirs: TrainState, mirror: Mirror, received: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors that the owners' copies hold. Raises PeerLost if they do not fit the model."""
        copies = {}
        for owner, rank in zip(self.how.owners, self.how.copies, strict=True):
            content = received[rank].get(f"{_COPY}/{owner}")
            copies[owner] = Replica(owner, self.how.step, content).tensors()
        whole = [joined(mirror.parts, copies)] if mirror.parts else copies.values()
        found = {key: tensor for one in whole for key, tensor in one.items()}
        layers = theirs.model.parameter_names
        there = {layers[name_of(key)] for key in found if name_of(key) in layers}
        expected = {key: like for layer in there for key, like in theirs.expected(layer).items()}
        for key, tensor in found.items():
            if key not in expected or (tensor.shape, tensor.dtype) != (expected[key].shape, expected[key].dtype):
                raise PeerLost(f"the copy of {key} does not fit the model")
        return found


def _parse(content: Tensor) -> dict[str, Tensor]:
    try:
        return parse(content.numpy().tobytes())
    except SafetensorError as error:
        raise PeerLost(f"a rank sent messages that cannot be read ({error})") from error


def _messages(received: Mapping[int, Mapping[str, Tensor]]) -> dict[tuple[int, int], dict[tuple[int, int], Tensor]]:
    """Return the messages among what ranks sent, by receiver and step, then by sender and tag. Raises PeerLost."""
    found: dict[tuple[int, int], dict[tuple[int, int], Tensor]] = defaultdict(dict)
    for sender, kept in received.items():
        for name, tensor in kept.items():
            step, *rest = name.split("/")
            if step == _COPY:
                continue
            try:
                receiver, tag = map(int, rest)
                found[receiver, int(step)][sender, tag] = tensor
            except ValueError as error:
                raise PeerLost(f"rank {sender} sent a message named {name!r}") from error
    return found


_ASSUMED_BANDWIDTH = 100e6  # bytes per second of a link that was not measured: about a gigabit
_MIRROR_SHARE = 0.5  # of the memory that is left when training begins; activations and gradients take the rest
_LOG_SHARE = 0.2  # likewise, for the messages that a rank keeps


def recover(
    life: Life,
    info: DataInfo,
    found: Recovery,
    plan: Plan,
    group: Group,
    copies: Sequence[Copies | None],
    say: Say,
) -> tuple[StateSource | None, frozenset[int]]:
    """Bring the state that ranks have in memory to a plan; all ranks of the group call this, with all ranks' copies.

    Return where the state was taken from, or None if it is not
    complete, and the ranks that are to follow the others until they have it, too. Raises PeerLost.
    """
    state, source = life.state, StateSource.MEMORY
    assert state is not None
    if found.missing:
        rebuilt = rebuild(life.job, info, state, life.last, found, group, copies)
        if isinstance(rebuilt, str):
            say(f"the state of step {found.step} cannot be completed without the lost ranks: {rebuilt}")
            state.drop()
            return None, frozenset()
        found, source = rebuilt, StateSource.REPLICA
    if state.parts:
        state.keep([])  # parts of a group that is over are no layers
    moves = senders(found.holders, plan)
    following = who_follows(state, moves, found.holders, plan, group, say)
    moves = [one for one in moves if one[2] not in following]
    if moves:
        move(state, moves, group)
    if group.rank in following:
        state.drop()
    state.step, state.valid = found.step, group.rank not in following
    return source, following


@dataclass(frozen=True)
class Spare:
    """What a rank says of its memory before ranks keep copies of each other's state."""

    size: int  # bytes of the state that only this rank holds
    left: float
    measured: bool  # whether this rank knows the links

    @classmethod
    def here(cls, life: Life, session: Trainer) -> Spare:
        """Return that of this rank."""
        held = owners(session.plan, life.job.recovery.mirrors)
        group = session.group
        size = session.state.bytes() if group.rank in held else 0
        return cls(size, memory_here(group), life.measured_among(group.started_as) is not None)


def mirror_for(life: Life, session: Trainer, say: Say, spare: Sequence[Spare] | None = None) -> Mirror | None:
    """Return what copies the state of ranks to each other's memory, if the plan needs that and there is room for it.

    All ranks of the group call this; `spare` is what each has to spare, if they know it already.
    """
    recovery, group, plan = life.job.recovery, session.group, session.plan
    group.log = None  # drops that of an earlier plan
    if not buddies(plan, recovery.mirrors):
        return None
    measured = life.measured_among(group.started_as)
    if spare is None:
        spare = group.exchange(Spare.here(life, session))
    mirrors = recovery.mirrors
    sizes, left = [one.size for one in spare], [one.left for one in spare]
    while mirrors and (short := crowded(plan, sizes, left, group.hosts, mirrors)) is not None:
        rank, needed = short
        mirrors -= 1
        what = f"{mirrors} instead of {mirrors + 1} copies" if mirrors else "no copies"
        say(
            f"warning: ranks keep {what} of each other's state: {group.name(rank)} would need {human_bytes(needed)} "
            f"for them, with {human_bytes(spare[rank].left)} left. If more ranks are lost at once than there are "
            "copies, all go on from a checkpoint (recovery.mirrors: 0 turns copies and this warning off)"
        )
    if not mirrors:
        return None
    assumed = _ASSUMED_BANDWIDTH
    if not all(one.measured for one in spare) and len(set(group.hosts)) > 1:
        # Copies that are sent too fast fill a slow link, and the messages of steps wait behind them.
        assumed = min(assumed, probe_network(group).bandwidth)

    def speed(to: int) -> float:
        return measured.network.between(group.rank, to).bandwidth if measured is not None else assumed

    log_bytes = min(recovery.log_bytes, int(spare[group.rank].left * _LOG_SHARE))
    return Mirror(plan, session.state, group, speed, recovery.mirror_budget, log_bytes, mirrors)


def crowded(
    plan: Plan,
    state_bytes: Sequence[int],
    left: Sequence[float],
    hosts: Sequence[str] | None = None,
    mirrors: int = 1,
) -> tuple[int, int] | None:
    """Return a rank that has too little memory for mirroring, and the bytes that it would need; None if there is none.

    An owner holds the copy that it sends. A buddy holds the replica, and the next one, which is arriving; and one more
    if all copies are taken at the same step, as with several mirrors. Where the members of a stage split channels, so
    does the owner, which holds its replica, too; the members of another stage all keep copies of their own.
    """
    keeping = buddies(plan, mirrors, hosts)
    split = {owner for owner in keeping if len(together(plan, owner)) > 1}
    alike = split if mirrors < 2 else set(keeping)
    needed = [
        (3 if rank in split else 1) * state_bytes[rank]
        + sum(
            (3 if owner in alike else 2) * state_bytes[owner]
            for owner, ranks in keeping.items()
            if rank in ranks or rank in beside(plan, owner)
        )
        for rank in range(plan.world_size)
    ]
    worst = max(range(plan.world_size), key=lambda rank: needed[rank] / max(1.0, left[rank]))
    return (worst, needed[worst]) if needed[worst] > left[worst] * _MIRROR_SHARE else None


def is_older_than_disk(life: Life, step: int, checkpoints: Checkpoints | None, say: Say) -> bool:
    """Return whether a checkpoint is newer than the newest state in memory, which is dropped then.

    That happens if all ranks that held a newer state are lost, and one that was lost long before them is back.
    """
    newer = checkpoints.newer_than(step) if checkpoints is not None else None
    if newer is None:
        return False
    assert life.state is not None
    life.state.drop()
    say(f"the state in memory is that of step {step}: going on from the checkpoint of step {newer} instead")
    return True


def restore(
    life: Life,
    session: Trainer,
    checkpoints: Checkpoints | None,
    first: bool,
    anew: bool,
    source: StateSource | None,
    say: Say,
) -> StateSource | None:
    """Restore the state from a checkpoint, or bring it to the beginning. Raises HorizonError.

    `source` says where it has been taken from already, if it has. A run that starts `anew` takes no checkpoint of the
    earlier run. Return where it was taken from, None if the run begins with this group.
    """
    if source is None:
        found = _from_disk(life, session, checkpoints, first, anew, say)
        source = None if first else StateSource.DISK if found else StateSource.START
    life.begun, life.awaited = True, None
    return source


def _from_disk(
    life: Life, session: Trainer, checkpoints: Checkpoints | None, first: bool, anew: bool, say: Say
) -> bool:
    """Bring the state to the newest checkpoint, or to the beginning; return whether there was a checkpoint."""
    state, found = session.state, None
    if checkpoints is None:
        if not first:
            raise PeerLost(
                "a lost rank alone held some of the layers, and no copy of them can be used; with checkpoints "
                "(checkpoint.enabled: true) the others would go on from the newest one",
                ends_job=True,
            )
    elif anew:
        pass  # those that there are belong to the earlier run, which is moved away before the first step
    elif first and not life.job.checkpoint.resume:
        checkpoints.set_aside()
    else:
        found = checkpoints.resume(state, session.plan)
    if found is None and (state.step or not state.valid):
        state.restart()
    if not first and found is None:
        say("no checkpoint had been saved: training begins again at step 0")
    return found is not None
