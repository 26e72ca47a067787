"""What a rank does as a member of one group: agree on a plan, take up the state, and train until the group ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import nn

from horizonml.comm.expected import boolean, fields, optional, text
from horizonml.comm.group import Group
from horizonml.data.choose import load
from horizonml.data.dataset import Data, DataInfo
from horizonml.data.workers import Workers
from horizonml.engine.local_steps import open_session
from horizonml.engine.session import Trainer
from horizonml.errors import DataError, JobError
from horizonml.files import cache_folder
from horizonml.machine.host import rss_bytes
from horizonml.machine.sensors import EnergyMeter
from horizonml.models.zoo import Model
from horizonml.plan.plan import PLAIN, Execution, Plan
from horizonml.planner.profile import Host
from horizonml.profiling.execution import choose_threads, execution_here, unused_bf16
from horizonml.runtime.checks import find_hosts, find_unreadable, why_untried
from horizonml.runtime.group_plan import GroupPlan, Introduction, Introductions
from horizonml.runtime.guarding import Guard
from horizonml.runtime.life import Last, Life, Loaded
from horizonml.runtime.outcome import LeavesUnsaved, Outcome
from horizonml.runtime.recording import (
    describe_members,
    doubt_profile,
    record_alone,
    record_plan,
    recorder_for,
    run_info,
)
from horizonml.runtime.restore import Spare, is_older_than_disk, mirror_for, recover, restore
from horizonml.runtime.stragglers import StragglerDetector
from horizonml.runtime.trainer import Training
from horizonml.state.carry import Digests, digests_of, hand_over, share_state
from horizonml.state.checkpoint import Arrival, Checkpoints, compatible_with
from horizonml.state.disks import DiskProbe, find_disks
from horizonml.state.follow import Following, needs, room_for
from horizonml.state.mirror import Mirror
from horizonml.state.resume import ShardsAway, agree_on_state
from horizonml.tasks.choose import task_for
from horizonml.telemetry.recorder import Recorder

_LOOK_SECONDS = 0.25  # between two looks at who has come


@dataclass(frozen=True)
class _Ready:
    """What a rank says before the first step of a session."""

    problems: list[str | None]  # why it cannot train on batches of some sizes
    digests: Digests
    spare: Spare


@dataclass
class Generation:
    """One group, of which this rank is a member."""

    life: Life
    group: Group
    number: int  # counts the formations of the group
    names: list[str]  # of the ranks' machines
    newcomers: Callable[[], bool]  # whether ranks wait that can be taken in
    meets_again: bool  # whether the ranks can meet again with others
    say: Callable[[str], None]  # tells the user, on rank 0

    def run(self) -> Outcome:
        """Train as a member of the group. Raises HorizonError."""
        try:
            return self._run()
        except ShardsAway as error:  # on all ranks
            if not self.meets_again:
                raise
            return self._wait_for_machines(error)

    def _run(self) -> Outcome:
        life, job, group = self.life, self.life.job, self.group
        if group.world_size < life.world_size:
            self.say(f"going on with {group.world_size} of {life.world_size} ranks")
        if life.taken is None:
            life.taken = rss_bytes()
        arrival = Arrival(job.run_folder / "checkpoints") if job.checkpoint.enabled else None
        told = Introductions(life, group, self.names[group.rank], arrival, self.say).exchange()
        hosts = find_hosts(group, [one.capacity for one in told])
        first, anew = self._agree_on_begin(told)
        assert life.state is not None
        assert life.info is not None
        model, info = life.state.model, life.info
        for note in model.pretrained.notes if model.pretrained is not None and not life.begun else ():
            self.say(note)
        found = agree_on_state(life.state, [one.memory for one in told])
        here = next(host for host in hosts if group.rank in host.ranks)
        self._use_threads(model, hosts, here, [one.threads for one in told])
        execution, narrow = use_execution(life, group, model, info, hosts, [one.execution for one in told], self.say)
        guard = Guard(life, group, execution, self.say, narrow)
        course = GroupPlan(life, group, self.names, guard, model, self.say)
        course.agree(info, hosts, told)
        self._tell_local_steps(course.plan, info)
        source, followers = None, frozenset[int]()
        checkpoints = None
        if arrival is not None:
            seen = [one.found for one in told if one.found is not None]
            folder, compatible = job.run_folder / "checkpoints", compatible_with(job, info, model)
            given = folder, group, job.checkpoint.keep, compatible, self.names, self.number
            checkpoints = Checkpoints(*given, arrival, seen)
            if job.checkpoint.copy_to is not None and group.rank == 0:  # whose disk has all shards
                from horizonml.state.backup import Backup

                spec = job.checkpoint
                life.backup = life.backup or Backup(job.checkpoint.copy_to, spec.copies, spec.keep_best is not None)
                checkpoints.on_saved = life.backup.add
        if found is not None and (anew or not is_older_than_disk(life, found.step, checkpoints, self.say)):
            copies = [one.copies for one in told]
            source, followers = recover(life, info, found, course.plan, group, copies, self.say)
        if source is not None and checkpoints is not None:
            newest = (one.newest_checkpoint for one in told if one.newest_checkpoint is not None)
            checkpoints.newest = max(newest, default=None)
        meters = group.hosts.index(group.hosts[group.rank]) == group.rank  # one rank of each machine
        energy = EnergyMeter() if meters else None
        restored = False
        if guard.applies(course.plan):
            with closing(self._session(course.plan, guard.execution())) as session:
                data = self._load(session)
                source, restored = restore(life, session, checkpoints, first, anew, source, self.say), True
                self._check(session, course.plan.without(followers))
            course.settle(data, bool(followers))
        guard.say_what_is_not_tried(course.plan)
        course.watch(told)
        devices = [one.device for one in told]
        members = describe_members(group.started_as, hosts, devices)
        about = run_info(life, group, self.number, model, here, members)
        going_on, moved = "resumed", ""  # what to say after a move
        while True:
            with closing(self._session(course.plan, guard.execution())) as session:
                data = self._load(session)
                info = data.info
                if moved:
                    self.say(moved)
                if not restored:
                    source, restored = restore(life, session, checkpoints, first, anew, source, self.say), True
                    spare = self._check(session, course.plan.without(followers))
                else:
                    spare = self._check(session, None)
                if anew:
                    self._set_aside(checkpoints)
                    anew = False
                if group.rank == 0:
                    record_plan(life, group, course.plan, course.agreed.problem, hosts, devices, self.say)
                session.begin()
                recorder = recorder_for(life, about, session, course.detector, energy, going_on)
                if life.outage is not None and source is not None:
                    recorder.after(life.outage, self.number, source, life.state.step + life.state.given_up)
                life.outage = None
                if followers:
                    _follow(session, followers)
                unsaved = None
                try:
                    outcome = self._train(session, data, checkpoints, recorder, course.detector, spare, hosts)
                except LeavesUnsaved as error:
                    outcome, unsaved = Outcome.STOPPED, error
            if outcome in (Outcome.STOPPED, Outcome.RE_FORM):
                hand_over(life.state, course.plan, group, leaves=outcome is Outcome.STOPPED)
            if unsaved is not None:
                raise unsaved
            if outcome is not Outcome.RE_PLAN:
                return outcome
            moved, going_on, followers = course.improve(), "on", frozenset()

    def _wait_for_machines(self, error: ShardsAway) -> Outcome:
        """Wait until further ranks come, which may be on the machines that keep missing shards, and meet them.

        All ranks of the group call this. Raises the error once that has taken `rendezvous.timeout`.
        """
        life, spec = self.life, self.life.job.rendezvous
        life.awaited = life.awaited or time.monotonic()
        patience = max(spec.timeout, spec.replace_timeout)
        until = life.awaited + patience
        machines, left = " and ".join(error.machines), until - time.monotonic()
        self.say(f"{error}; waiting for {machines} to come back, for {left:.0f} s at most (rendezvous.timeout)")
        while True:
            own = [life.stop.wanted, self.newcomers(), time.monotonic() >= until]
            told = self.group.gather_json(own, fields(boolean, boolean, boolean))
            stopping, coming, late = (any(one) for one in zip(*told, strict=True))
            if stopping or coming:
                return Outcome.STOPPED if life.stop.wanted else Outcome.RE_FORM
            if late:
                raise error
            time.sleep(_LOOK_SECONDS)

    def _tell_local_steps(self, plan: Plan, info: DataInfo) -> None:
        job = self.life.job
        if plan.local is not None and not self.life.begun:
            assert self.life.state is not None
            steps, is_adam = job.total_steps(-(-info.train // job.batch_size)), self.life.state.optimizer.is_adam
            for note in plan.local.notes(steps, len(plan.replicas), is_adam):
                self.say(note)
            if any(isinstance(one, nn.SyncBatchNorm) for one in self.life.state.model.recorded.modules()):
                self.say(
                    "warning: nn.SyncBatchNorm normalises over the samples of a replica only, as replicas that take "
                    "local steps do not meet in every step"
                )

    def _session(self, plan: Plan, execution: Execution) -> Trainer:
        life = self.life
        assert life.state is not None
        assert life.info is not None
        if plan.local is None:
            life.state.forget_outer()
        task = task_for(life.job, life.info)
        steps = life.job.total_steps(-(-life.info.train // life.job.batch_size))
        return open_session(plan, life.state, self.group, task, life.job.batch_size, execution, steps)

    def _load(self, session: Trainer) -> Data:
        """Return the data for this rank: inputs for the first stage, targets for the last, nothing in between.

        All ranks know what of it cannot be read. What an earlier group needed as well has been read already. Raises
        DataError.
        """
        life, info = self.life, self.life.info
        assert info is not None
        parts = session.is_first, session.is_last
        if life.data is None or (life.data.inputs, life.data.targets, life.data.data.info) != (*parts, info):
            life.data = None  # frees the memory before more is read
            data = load(life.job.data, info, cache_folder() / "data", inputs=parts[0], targets=parts[1])
            life.data = Loaded(data, *parts)
        data = life.data.data
        if life.job.data.corrupt == "skip" and info.unreadable is None:
            info = life.info = find_unreadable(life.job, session, data, self.say)
            life.data = Loaded(replace(data, info=info), session.is_first, session.is_last)
            data = life.data.data
        return data

    def _agree_on_begin(self, told: Sequence[Introduction]) -> tuple[bool, bool]:
        """Return whether no rank of this group has trained this run before, and whether it starts over.

        An earlier run is moved away only when the first step is about to be taken (see `_set_aside`). Raises JobError
        on all ranks if it must not be.
        """
        life = self.life
        anew = any(one.fresh for one in told) and not any(one.moved_away for one in told)
        if anew:
            life.fresh = True  # also for the next group, if this one ends before its first step
            for rank, one in enumerate(told):
                if one.foreign is not None:
                    raise JobError(one.foreign if len(told) == 1 else f"{self.group.name(rank)}: {one.foreign}")
        life.moved_away = not anew
        return not any(one.begun for one in told), anew

    def _check(self, session: Trainer, compared: Plan | None) -> list[Spare]:
        """Compare what the ranks hold before a session's first step, and return what memory each has to spare.

        All members of a stage of the plan that is `compared`, if there is one, begin with the same state, bit for bit.
        A batch may leave a rank a single sample, on which BatchNorm cannot train: that is said now, not at the end of
        the first epoch. Raises DataError on all ranks.
        """
        life, group, info = self.life, self.group, self.life.info
        assert info is not None
        size, state = life.job.batch_size, session.state
        sizes = sorted({min(size, info.train), info.train % size} - {0})
        problems = [session.try_smallest(size) for size in sizes]
        digests = digests_of(state, compared, group.rank) if compared is not None else {}
        told = group.exchange(_Ready(problems, digests, Spare.here(life, session)))
        for rank, one in enumerate(told):
            for size, problem in zip(sizes, one.problems, strict=True):
                if problem is not None:
                    raise DataError(
                        f"batch_size: a batch of {size} samples (of {info.train}) leaves {group.name(rank)} with one "
                        f"sample, on which this model cannot train ({problem}); change batch_size, data.samples, or "
                        "parallel.micro_batches"
                    )
        if compared is not None:
            for rank, name in share_state(state, compared, group, [one.digests for one in told]):
                self.say(
                    f"warning: {group.name(rank)} began with other values than its stage's first member ({name}, for "
                    "one) and has taken over that member's; processors that round differently can be the reason"
                )
        return [one.spare for one in told]

    def _set_aside(self, checkpoints: Checkpoints | None) -> None:
        """Move an earlier run away, now that data, model and plan are known to work. Raises JobError on all ranks."""
        life, group = self.life, self.group
        probe = DiskProbe(life.job.run_folder)
        leads = find_disks(probe, group.gather_json(probe.token, text), group).leads

        def move() -> str | None:
            problem = life.folder.set_aside() if leads[group.rank] == group.rank else None
            if problem is not None:
                raise JobError(problem)
            return str(life.folder.previous) if life.folder.previous is not None else None

        kept = group.agree(move, optional(text))
        life.moved_away = True
        if checkpoints is not None:
            checkpoints.announce()
        places = sorted({self.names[rank] for rank in set(leads) if kept[rank] is not None})
        if places:
            path, previous = life.job.run_folder, next(one for one in kept if one is not None)
            where = f" on {', '.join(places)}" if len(set(leads)) > 1 else ""
            own = kept[group.rank]
            back = f". To go back to it: mv {path} {path}.new && mv {own} {path}" if own is not None else ""
            self.say(f"the earlier run is kept in {own or previous}{where}, until the next --fresh{back}")

    def _use_threads(self, model: Model, hosts: list[Host], here: Host, kept: list[int | None]) -> None:
        """Choose how many threads this rank computes with; results depend on it, so a rank keeps its number."""
        life, group = self.life, self.group
        beside = next((kept[rank] for rank in here.ranks if kept[rank] is not None), None)
        threads = life.job.parallel.threads or beside
        if any(all(kept[rank] is None for rank in host.ranks) for host in hosts) and not life.job.parallel.threads:
            chosen = choose_threads(life.job, model, group, here)
            threads = threads or chosen
        assert threads is not None
        life.threads = threads
        torch.set_num_threads(threads)

    def _train(
        self,
        session: Trainer,
        data: Data,
        checkpoints: Checkpoints | None,
        recorder: Recorder,
        detector: StragglerDetector | None,
        spare: list[Spare],
        hosts: list[Host],
    ) -> Outcome:
        life, ended_as, followed = self.life, "failed", session.following is not None
        life.last = None
        workers: Workers | None = None

        def mirror() -> Mirror | None:
            made = mirror_for(life, session, self.say, spare if not followed else None)
            life.last = Last(self.number, self.group.started_as, made, session.execution) if made is not None else None
            return made

        try:
            life.started = life.started or time.monotonic()
            workers = life.workers_for(data, session.is_first, session.is_last)
            given = checkpoints, recorder, life.stop, self.newcomers, detector, mirror, workers
            outcome = Training(life.job, session, data, *given).run()
            if life.last is not None and outcome is Outcome.RE_PLAN:
                life.last.mirror.finish()
                life.last = None  # what this plan's ranks have copied is of no use to the next one's
            ended_as = outcome.value
            if outcome is Outcome.COMPLETE and self.group.world_size > 1:
                record_alone(life, self.group, hosts, self.names, recorder)
            doubt_profile(life, session, recorder)
            return outcome
        finally:
            if workers is not None and workers is not life.workers:
                workers.close()
            life.steps += recorder.steps
            recorder.close(ended_as)
            life.newest_checkpoint = checkpoints.newest if checkpoints is not None else None


def _follow(session: Trainer, ranks: frozenset[int]) -> None:
    """Begin to bring some ranks of a session their state; all ranks of the group call this. Raises PeerLost."""
    state, plan, group = session.state, session.plan, session.group
    room = room_for(group) - needs(state, plan, ranks, group.rank).copies
    following = Following(state, plan, group, ranks, room)
    session.follow(following)
    following.start()


def use_execution(
    life: Life,
    group: Group,
    model: Model,
    info: DataInfo,
    hosts: Sequence[Host],
    kept: Sequence[Execution | None],
    say: Callable[[str], None],
) -> tuple[Execution, bool]:
    """Return how this rank runs layers, and whether any rank runs them in bf16; all ranks call this together.

    The first rank on a machine chooses for the others on it. Results depend on the choice, as they do on the number of
    threads, so a rank keeps it, and one that is new on a machine takes over that of the others there. `kept` are the
    choices that ranks have.
    """
    host_of = {rank: host for host in hosts for rank in host.ranks}

    def known_to(rank: int) -> Execution | None:
        return next((kept[one] for one in (rank, *host_of[rank].ranks) if kept[one] is not None), None)

    everyone = [known_to(rank) for rank in range(group.world_size)]
    if None in everyone:
        steps = life.job.total_steps(-(-info.train // life.job.batch_size))
        job, why = life.job, why_untried(life.job, info)
        if job.precision == "auto" and why is not None:
            say(f"precision: auto: layers are computed in fp32, as {why}")
            job = job.model_copy(update={"precision": "fp32"})
        leads = host_of[group.rank].ranks[0] == group.rank  # others on the machine wait meanwhile
        chosen = group.exchange(execution_here(job, model, group.world_size, steps, say) if leads else PLAIN)
        everyone = [one or chosen[host_of[rank].ranks[0]] for rank, one in enumerate(everyone)]
    found = [one for one in everyone if one is not None]
    unused = unused_bf16(life.job, found) if life.execution is None else None
    if unused is not None:
        say(unused)
    life.execution = found[group.rank]
    return life.execution.among(found), any(one.precision == "bf16" for one in found)
