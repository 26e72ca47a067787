"""Trains with local steps: replicas train independently, and synchronise every so many steps (see `plan.local`).

A replica is a session of its own, with the part of the plan that its ranks have, on its rows of each global batch. It
updates its parameters whenever it has as many rows as an equal share of a batch, so slow devices, which have smaller
shares, take fewer local steps. Between synchronisations nothing travels between replicas. In a synchronisation, the
members of each stage sum their outer gradients (`outer.fragment`); then all ranks agree on the loss, on whether to go
on, and on whether all of that was finite, and only then does anyone go on from the new parameters.

The state of a run with local steps is what all members have agreed on last. When the session ends at any other
moment, the parameters go back to that, so that all ranks of the next group hold the same. Each replica that is still
whole then goes on from its own steps, so the loss of another one costs nobody else a step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import torch

from horizonml.comm.expected import boolean
from horizonml.comm.group import Group
from horizonml.comm.work import in_thread
from horizonml.data.dataset import NeededRows
from horizonml.data.sampler import name_seed
from horizonml.data.samples import BatchRows, JoinedBatch
from horizonml.engine.clock import StepResult, Totals, merged
from horizonml.engine.fragment import Fragment, fragments_of
from horizonml.engine.session import NO_WISHES, Session, Trainer, Wishes
from horizonml.engine.sync.base import Members
from horizonml.engine.verdict import UNCHANGED, TotalsSum, check_held_out
from horizonml.errors import Diverged, PeerLost, PlanError
from horizonml.machine.host import cpu_seconds
from horizonml.plan.local import Local
from horizonml.plan.plan import PARTS_REPEAT, PLAIN, Execution, Plan
from horizonml.state.follow import Following
from horizonml.state.optim import OwnSteps, PreparedOuter
from horizonml.state.train_state import TrainState
from horizonml.tasks.task import Batch, Task

_SYNCED = (
    "Parameters are as they were after step {step}, when the replicas last agreed on them; lower optimizer.lr or "
    "parallel.sync.learning_rate, clip gradients (optimizer.clip_norm), or synchronise more often (parallel.sync.every)"
)


def open_session(
    plan: Plan,
    state: TrainState,
    group: Group,
    task: Task,
    batch_size: int,
    execution: Execution = PLAIN,
    steps: int = 0,
) -> Trainer:
    """Return this rank's session of a plan, with or without local steps, for a run of so many `steps` in all.

    All ranks of the group call this.
    """
    if plan.local is None:
        return Session(plan, state, group, task, batch_size, execution)
    return LocalSession(plan, state, group, task, batch_size, execution, steps)


class LocalSession(Trainer):
    """Holds this rank's part in one generation that takes local steps, as a `Trainer`."""

    def __init__(
        self,
        plan: Plan,
        state: TrainState,
        group: Group,
        task: Task,
        batch_size: int,
        execution: Execution = PLAIN,
        steps: int = 0,
    ) -> None:
        """Connect the replicas and their stages; see `open_session`."""
        plan.check(len(state.model.chain), group.world_size)
        assert plan.local is not None
        self.plan, self.state, self.group, self.task, self.execution = plan, state, group, task, execution
        self.following: Following | None = None
        self._local: Local = plan.local
        self._steps = steps
        self._place = next(place for place, ranks in enumerate(plan.replicas) if group.rank in ranks)
        shares = self._shares = plan.stages[0].paces  # relative to the mean
        within = group.within(plan.replicas[self._place])
        self._inner = Session(plan.replica(self._place), state, within, task, -(-batch_size // len(shares)), execution)
        self.stages, self.clock = self._inner.stages, self._inner.clock
        group.barrier()
        self._totals = TotalsSum(group, task, self.stages, len(plan.stages) - 1)
        self._ties = [list(names) for names in state.model.ties]
        spans = ({plan.stage_of(state.layer_of(f"model/{name}")) for name in names} for names in self._ties)
        if any(len(stages) > 1 for stages in spans):
            self._inner.close()
            raise PlanError(
                "parallel.sync: layers in different stages share a parameter, which replicas of a pipeline cannot "
                "synchronise; use strategy ddp, or stages that hold all of these layers"
            )
        self._fragments: list[list[Fragment]] = []  # by number, those of this rank's stages; once training begins
        self._flying: int | None = None  # the fragment whose sum is under way
        self._due = 0  # the step after which it is applied, if no replica is late
        self._arriving: Future[None] | None = None  # waits for it, and takes its second half, while training goes on
        self._ending = False  # whether the next sum is to be a full synchronisation
        self._synced = self._base = state.step
        self._waiting: list[BatchRows] = []  # rows that are to be a part of the next local step
        self._pending = [0] * len(shares)  # how many rows wait on each replica
        self._done = [state.step] * len(shares)  # the step up to which each replica had trained in an earlier group
        self._trained = state.step  # the step up to which this replica has worked on all of its rows
        self._summing: tuple[int, ...] = ()  # the fragments on which all are about to agree
        self._begun = self._refused = False
        self._found, self._samples = self._totals.found({}), 0
        self._sent = 0  # bytes, in the step under way
        self._apart: float | None = None  # how far this replica's outer gradient was from the mean
        self._stop = self._newcomers = False
        self._last: Totals | None = None

    def follow(self, following: Following) -> None:
        """Refuse followers: whoever joins replicas receives the state before training goes on."""
        raise AssertionError("nobody follows replicas that take local steps")

    def end_following(self) -> None:
        """Do nothing."""

    def _begin_training(self) -> None:
        """Take the state as what all agree on; it has been loaded, or received, by now."""
        if self._fragments:
            return
        self.state.optimizer.local, self.state.given_up = True, 0
        every = []
        for number, stage in self.stages.items():
            members = Members(self.plan.stages[number], number, self.group, self.clock)
            here = [[name for name in names if name in stage.parameters] for names in self._ties]
            ties = [names for names in here if len(names) > 1]
            every.append(fragments_of(self._local, members, self.state, stage.parameters, stage.module, ties))
        self._fragments = [[of_stage[number] for of_stage in every] for number in range(self._local.fragments)]
        self._synced = self._base = self._trained = self.state.step
        self._done = [self.state.step] * len(self._shares)

    def begin(self) -> None:
        """Go on from what the replicas have done since they agreed last, if an earlier group was lost then.

        Replicas may have come differently far, so the next step is the first one that any of them has not done, or the
        one that ends with the synchronisation that did not come about. What a replica did that has lost a rank is lost;
        others repeat their steps only if this rank's layers have changed.
        """
        self._begin_training()
        own, agreed = self.state.own_steps, self.state.step
        kept = self._kept(own)
        mine = (kept.done, kept.replica, kept.rows) if kept is not None else (agreed, (), ())
        told = self.group.exchange(Kept(own is not None, *mine))
        members = [[told[rank] for rank in ranks] for ranks in self.plan.replicas]
        done = [done_by(ranks, agreed) for ranks in members]
        due = next(step for step in itertools.count(agreed + 1) if self._local.synchronises(step))
        first = min([due - 1, *(step for step in done if step is not None)]) if any(done) else agreed
        self._done = [first if step is None else step for step in done]
        goes_on = [is_whole(ranks) for ranks in members]
        for number, fragments in enumerate(self._fragments):
            rows = [ranks[0].rows[number] if here else 0.0 for ranks, here in zip(members, goes_on, strict=True)]
            for fragment in fragments:
                fragment.go_on(kept.tensors[number] if kept and goes_on[self._place] else None, rows)
        if kept and goes_on[self._place]:
            self._found, self._samples = kept.found, kept.samples
        self._trained = self._done[self._place]
        self.state.step = self._base = first
        self.state.given_up, self.state.own_steps, self._begun = self._trained - first, None, True

    def _kept(self, own: OwnSteps | None) -> OwnSteps | None:
        """Return what this rank can go on from of its own steps, or None if there is nothing."""
        if own is None or self.state.step not in (own.since, own.pending) or not any(own.rows):
            return None
        every = [{name: t for one in here for name, t in one.own().items()} for here in self._fragments]
        shapes = [{name: tensor.shape for name, tensor in here.items()} for here in every]
        if shapes != [{name: tensor.shape for name, tensor in here.items()} for here in own.tensors]:
            return None
        if self.state.step == own.since:
            return own
        # The others had gone on from a synchronisation, and so has this rank meanwhile.
        summed = own.sums
        return replace(
            own,
            done=own.pending if len(summed) == len(own.rows) else own.done,
            rows=tuple(0.0 if number in summed else rows for number, rows in enumerate(own.rows)),
            tensors=tuple(every[n] if n in summed else tensors for n, tensors in enumerate(own.tensors)),
            found=torch.zeros_like(own.found),
            samples=0,
        )

    def _own_steps(self) -> OwnSteps:
        """Return copies of what this rank has done since all agreed last."""
        prepared = self.state.prepared
        rows = tuple(here[0].rows if here else 0.0 for here in self._fragments)
        return OwnSteps(
            self._synced,
            self._trained,
            (self._place, len(self.plan.replicas[self._place])),
            rows,
            tuple(
                {name: tensor.clone() for one in here for name, tensor in one.own().items()} if any(rows) else {}
                for here in self._fragments
            ),
            prepared.step if isinstance(prepared, PreparedOuter) else 0,
            self._summing,
            self._found,
            self._samples,
        )

    def step(self, batch: Batch, learning_rate: float, wishes: Wishes = NO_WISHES) -> StepResult:
        """Train on this replica's rows of a global batch, and synchronise if it is time; see `Session.step`.

        The totals are those of all replicas since the last synchronisation in a step that ends with one, and this
        replica's own in others. Only the former say whether anyone wants to end, or to join.
        """
        if self.group.is_over:  # nothing that travels would show it
            raise PeerLost("the group was broken off")
        self.group.moved_on()
        self._begin_training()
        self.state.prepared, self._begun = None, True
        number, self._cpu = self.state.step, cpu_seconds()
        self._stop, self._newcomers = self._stop or wishes.stop, self._newcomers or wishes.newcomers
        leaving, ahead = self._local.sent(number + 1), self._flying is not None and number >= self._due
        full = wishes.full or (self._ending and leaving is not None)
        steps = self._train(batch, learning_rate, full)
        self.state.step = number + 1
        self.clock.restart()
        self._sent, self._apart, totals = 0, None, None
        if not full:
            if leaving is not None:
                self._begin_sum(leaving)
                if self._local.delay or self._local.late:
                    self._arriving = in_thread(partial(_arrive, self._fragments[leaving]), "outer gradient")
            if self._flying is not None and self._is_due:
                totals = self._agree([self._flying])
            full = totals is not None and self._ends(totals)
            if totals is not None and self._ending:
                totals = replace(totals, stop=False, newcomers=False)
        if full:
            totals = self._synchronise_fully()
        return replace(self._merged(steps, totals), ahead=ahead)

    @property
    def _is_due(self) -> bool:
        """Return whether the sum under way is waited for: it is complete, or the replicas have gone on long enough.

        The ranks of a replica decide together, because the next step needs all of them.
        """
        step, waiting = self.state.step - self._due, self._arriving
        if step < 0 or waiting is None or step >= self._local.late:
            return step >= 0
        return all(self._inner.group.gather_json(waiting.done(), boolean))

    def _ends(self, totals: Totals) -> bool:
        """Return whether a full synchronisation follows one after which replicas have parameters of their own.

        Replicas that need not wait for one another have come differently far, so the next sum is a full one.
        """
        wanted = totals.stop or totals.newcomers
        self._ending = wanted and self._local.late > 0
        return wanted and not self._ending and (self._local.fragments > 1 or self._local.delay > 0)

    def _train(self, batch: Batch, learning_rate: float, full: bool) -> list[StepResult]:
        """Take the local steps that are due with a global batch; before a `full` synchronisation, at least one."""
        parts, number = self._parts(batch.size, self.state.step), self.state.step
        parts = [part if number >= done else (0, 0) for part, done in zip(parts, self._done, strict=True)]
        updates = [self._local.updates(share, number - self._base) for share in self._shares]
        updates = [max(1, due) for due in updates] if full else updates
        updates = [due if number >= done else 0 for due, done in zip(updates, self._done, strict=True)]
        waiting = [before + end - first for before, (first, end) in zip(self._pending, parts, strict=True)]
        trained = [rows if due else 0 for rows, due in zip(waiting, updates, strict=True)]
        self._pending = [before - done for before, done in zip(waiting, trained, strict=True)]
        for fragment in itertools.chain(*self._fragments):
            fragment.count(trained)
        self._waiting.append(BatchRows(batch, *parts[self._place]))
        if not updates[self._place]:
            return []
        for fragment in itertools.chain(*self._fragments):
            fragment.take_up(self._local.taken_up(number, self._steps))
        rows, self._waiting = JoinedBatch(self._waiting), []
        steps = []
        for place, piece in enumerate(rows.split(updates[self._place])):
            self.state.step = number
            seed = self.state.model.seed
            self._inner.draws = name_seed(seed, "replica", self._place, place) if self._place or place else seed
            try:
                steps.append(self._inner.step(piece, learning_rate))
            except Diverged as error:
                raise Diverged(str(error).replace(UNCHANGED, _SYNCED.format(step=self._synced))) from None
            self._found, self._samples = self._found + self._inner.found, self._samples + piece.size
            self._last = steps[-1].totals
        self._trained = number + 1
        return steps

    def _parts(self, size: int, step: int | None) -> list[tuple[int, int]]:
        """Return the replicas' parts of a batch; those that agree in every step have the same in each."""
        return self.plan.stages[0].parts(size, step if self._local.every > 1 else None)

    def _begin_sum(self, number: int) -> None:
        """Begin to sum a fragment's outer gradients."""
        self.clock.switch("compute", "outer gradient")
        for fragment in self._fragments[number]:
            fragment.begin()
            self._sent += fragment.bytes_sent
        self._flying, self._due = number, self.state.step + self._local.delay

    def _synchronise_fully(self) -> Totals:
        """Synchronise all fragments while everyone waits, so that there is one set of parameters. Raises PeerLost.

        A fragment on which nobody has worked since its last synchronisation is left out: it would only be moved on by
        the outer momentum. What arrives late is mixed with the steps taken meanwhile, as ever, so these count.
        """
        if self._flying is not None:
            self._agree([self._flying])
        self._ending = False
        changed = [number for number, here in enumerate(self._fragments) if any(one.has_changed for one in here)]
        for number in changed:
            self._begin_sum(number)
        totals = self._agree(changed)
        self._base = self.state.step
        return totals

    def _agree(self, numbers: Sequence[int]) -> Totals:
        """Wait for the sums of some fragments, and go on from them once all ranks have them.

        They count as applied after the same step everywhere, however far a replica has gone on meanwhile. Raises
        PeerLost and Diverged.
        """
        fragments = [one for number in numbers for one in self._fragments[number]]
        step = min(self._due, self.state.step) if self._flying is not None else self.state.step
        late = self.state.step > self._due - self._local.delay
        self.clock.switch("transfer", "outer gradient")
        if self._arriving is not None:
            self._arriving.result()
            self._arriving = None
        results = [fragment.finish(step) for fragment in fragments]
        self._flying = None
        self._apart = max((apart for _, apart in results if apart is not None), default=None)
        finite = all(fine for fine, _ in results) and bool(torch.isfinite(self._found).all())
        found = {key: value for fragment in fragments for key, value in fragment.found.items()}
        if finite:  # or those who lose the others' consent could go on from what all would have refused
            self.state.prepared, self._summing = PreparedOuter(step, found), tuple(numbers)
        self.clock.switch("wait", "others")
        totals = self._totals.agree(self._found, self._samples, None, self._stop, self._newcomers, finite)
        self.clock.switch("compute", "update")
        self.state.prepared = None
        if not totals.finite:
            self._refuse(step)
        for fragment in fragments:
            fragment.commit(step, late)
        self._synced = step
        return totals

    def _refuse(self, step: int) -> NoReturn:
        """Raise Diverged on all ranks, naming one whose parameters or loss are not finite."""
        self._refused = True
        own = [p.sum() for stage in self.stages.values() for p in stage.parameters.values()]
        broken = not all(bool(torch.isfinite(value)) for value in (*own, *self._found))
        told = self.group.gather_json(broken, boolean)
        rank = next((rank for rank, found in enumerate(told) if found), None)
        who = f" (the parameters or the loss of rank {rank} are not)" if rank is not None else ""
        raise Diverged(f"step {step}: the outer gradient is not finite{who}. {_SYNCED.format(step=self._synced)}")

    def _merged(self, steps: Sequence[StepResult], totals: Totals | None) -> StepResult:
        """Return what this rank saw of a global step: its local steps, and the synchronisation if there was one."""
        wall, spent = self.clock.finish(), self.clock.totals
        tail = StepResult(
            totals or self._last or self._totals.nothing(),
            wall,
            compute=spent["compute"],
            transfer=spent["transfer"],
            wait=spent["wait"],
            samples=0,
            entered=0,
            traffic={"previous": (0, 0), "next": (0, 0), "members": (self._sent, self._sent)},
            divergence=self._apart,
            spans=self.clock.spans,
            told=self._totals.heard(),
        )
        if totals is not None:
            self._found, self._samples = torch.zeros_like(self._found), 0
            self._stop, self._newcomers = self._stop and self._ending, self._newcomers and self._ending
        found = merged(steps, tail)
        self._totals.tell(found, self._cpu)
        return found

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Totals:
        """Return the loss and the metrics on held-out batches, which the replicas divide among them; see `Session`."""
        own = (
            JoinedBatch([BatchRows(batch, *self.plan.stages[0].parts(batch.size)[self._place])]) for batch in batches
        )
        found, samples = self._inner.judge(rows for rows in own if rows.size)
        totals = self._totals.agree(found, samples, None)
        check_held_out(self.group, self.state.step, totals.loss, float(found[0]))
        return totals

    def needs(self, size: int, training: bool, step: int) -> NeededRows:
        """See `Session.needs`."""
        first, end = self._parts(size, step if training else None)[self._place]
        if first == end:
            return NeededRows()
        found = self._inner.needs(end - first, training, step)
        return NeededRows(*([(first + a, first + b) for a, b in rows] for rows in (found.inputs, found.targets)))

    def try_smallest(self, size: int) -> str | None:
        """See `Session.try_smallest`."""
        parts = [self._parts(size, step)[self._place] for step in range(PARTS_REPEAT)]
        pieces = max(1, math.ceil(self._shares[self._place] - 1e-9))
        sizes = sorted({(end - first) // among for first, end in parts for among in (1, pieces)} - {0})
        return next((why for rows in sizes if (why := self._inner.try_smallest(rows)) is not None), None)

    def close(self) -> None:
        """Go back to what all ranks have agreed on last, and release everything but the state and this rank's steps."""
        self._inner.close()
        if self._begun and not self._refused:
            self.state.own_steps = self._own_steps()
        for fragment in itertools.chain(*self._fragments):
            fragment.roll_back()
        if self._fragments:
            self.state.given_up, self.state.step = self.state.step - self._synced, self._synced
        if not isinstance(self.state.prepared, PreparedOuter):
            self.state.prepared = None
        self.state.optimizer.local = False
        self._fragments, self._waiting = [], []


@dataclass(frozen=True)
class Kept:
    """Describes what a rank has of its own steps when a group begins."""

    before: bool  # whether it was in an earlier group that took local steps
    done: int
    replica: tuple[int, ...]  # the number of the replica that it was in, and the ranks of that; empty without steps
    rows: tuple[float, ...]


def is_whole(ranks: Sequence[Kept]) -> bool:
    """Return whether the members of a replica were together before, and can go on from the same step."""
    return len({(one.replica, one.done) for one in ranks}) == 1 and ranks[0].replica[1:] == (len(ranks),)


def done_by(ranks: Sequence[Kept], agreed: int) -> int | None:
    """Return the step up to which a replica has trained, or None if it begins anew, wherever the others are.

    `ranks` are its members; `agreed` is the step up to which all have. Members that are together as before, but cannot
    go on, repeat their steps; where they come from several replicas, those have lost ranks, and their steps with them.
    """
    if is_whole(ranks):
        return max(agreed, ranks[0].done)
    together = is_whole([replace(one, done=0) for one in ranks])
    return agreed if together or any(one.before and not one.replica for one in ranks) else None


def _arrive(fragments: Sequence[Fragment]) -> None:
    """Wait until the sums of some fragments have arrived. Raises PeerLost."""
    for fragment in fragments:
        fragment.wait()
