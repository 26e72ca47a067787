"""What a rank does as a member of one group: agree on a plan, take up the state, and train until the group ends.

Agrees on how each rank runs the layers; it keeps to that for as long as it lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from horizonml.comm.expected import boolean, fields, number, optional, text, whole
from horizonml.comm.group import Group
from horizonml.data.choose import load
from horizonml.data.dataset import Data, DataInfo
from horizonml.data.workers import Workers
from horizonml.engine.local_steps import open_session
from horizonml.engine.session import Trainer
from horizonml.errors import DataError, JobError
from horizonml.files import cache_folder
from horizonml.job.schema import Job
from horizonml.machine.accelerator import computing
from horizonml.machine.host import rss_bytes
from horizonml.machine.sensors import EnergyMeter
from horizonml.models.zoo import Model
from horizonml.plan.execution import Execution, Executions, to_json
from horizonml.plan.plan import Plan
from horizonml.planner.profile import Host
from horizonml.profiling.executions import choose_executions, read_layers, untried, unused_bf16
from horizonml.profiling.threads import choose_threads
from horizonml.runtime.agreement import Agreed, agree_on_model, describe_data, make_plan, optimizer_copies
from horizonml.runtime.capacity import find_hosts, refuse_what_cannot_fit, why_untried
from horizonml.runtime.cuts import agree_on_cuts
from horizonml.runtime.guarding import Guard
from horizonml.runtime.joining import Place, follow
from horizonml.runtime.life import Last, Life, Loaded
from horizonml.runtime.outcome import LeavesUnsaved, Outcome
from horizonml.runtime.recording import (
    assumed_problem,
    describe_members,
    describe_planning,
    device_facts,
    doubt_profile,
    record_planning,
    recorder_for,
    run_info,
)
from horizonml.runtime.recovery import hand_over, known, mirror_for, recover
from horizonml.runtime.stragglers import StragglerDetector
from horizonml.runtime.taking_up import checkpoints_for, find_unreadable, is_older_than_disk, take_up
from horizonml.runtime.trainer import train
from horizonml.state.checkpoint import Checkpoints
from horizonml.state.disks import Disks
from horizonml.state.mirror import Mirror
from horizonml.state.move import holders, move, senders
from horizonml.state.resume import ShardsAway, agree_on_state
from horizonml.state.runfolder import foreign
from horizonml.state.train_state import TrainState
from horizonml.tasks.choose import task_for
from horizonml.telemetry.recorder import Recorder
from horizonml.text import human_bytes, human_seconds

_MOST_THREADS = 4096
_LOOK_SECONDS = 0.25  # between two looks at who has come


@dataclass
class Generation:
    """One group, of which this rank is a member."""

    life: Life
    group: Group
    number: int  # counts the formations of the group
    names: list[str]  # of the ranks' machines
    started_as: list[int]  # the rank that each member was started as
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
        """Train as a member of the group; see `run`."""
        life, job, group = self.life, self.life.job, self.group
        if group.world_size < life.world_size:
            self.say(f"going on with {group.world_size} of {life.world_size} ranks")
        if life.taken is None:
            life.taken = rss_bytes()
        hosts = find_hosts(group, life.taken)
        first, anew = self._agree_on_begin()
        info = describe_data(job, group, life.info)
        known = life.state.model if life.state is not None and info == life.info else None
        model, notes = agree_on_model(job, info, group, known)
        if life.state is None or model is not known:
            local = job.parallel.may_take_local_steps
            life.state = TrainState(model, job.optimizer, job.ema, local, device=computing().device)
            life.info = info
        proven = agree_on_cuts(job, model, info, group, self.say)
        if proven is not model:
            life.state.recut(proven)
            model = proven
        for note in notes if not life.begun else ():
            self.say(note)
        found = agree_on_state(life.state, life.begun, group)
        here = next(host for host in hosts if group.rank in host.ranks)
        self._use_threads(model, hosts, here)
        executions = use_executions(life, group, model, info, hosts, self.say)
        guard = Guard(life, group, executions, self.say)
        agreed = self._agree_on_plan(model, info, hosts, guard)
        self._tell_local_steps(agreed.plan, info)
        source, followers = None, frozenset[int]()
        checkpoints = checkpoints_for(life, group, self.number, self.names, info, model)
        if found is not None and (anew or not is_older_than_disk(life, found.step, checkpoints, self.say)):
            source, followers = recover(life, info, found, agreed.plan, self._place())
        meters = group.hosts.index(group.hosts[group.rank]) == group.rank  # one rank of each machine
        energy = EnergyMeter() if meters else None
        devices = group.gather_json(device_facts(self.names[group.rank], group.hosts[group.rank]))
        plan, moved, taken = agreed.plan, "", False  # what to say after a move
        if guard.applies(plan):
            with closing(self._session(plan, guard.executions())) as session:
                data = self._load(session)
                source, taken = take_up(life, session, checkpoints, first, anew, source, followers, self.say), True
            plan = guard.settle(plan, data, bool(followers))
            agreed = self._plan_again(agreed, plan, guard, model, following=bool(followers))
            plan = agreed.plan
        guard.say_what_is_not_tried(plan)
        detector = self._detector(agreed, guard)
        members = describe_members(self.started_as, group.hosts, hosts, devices)
        about = run_info(life, group, self.number, model, here, members)
        while True:
            with closing(self._session(plan, guard.executions())) as session:
                data = self._load(session)
                info = data.info
                if moved:
                    self.say(moved)
                elif not taken:
                    source = take_up(life, session, checkpoints, first, anew, source, followers, self.say)
                if anew:
                    self._set_aside(checkpoints)
                    anew = False
                if group.rank == 0:
                    self._record_plan(plan, agreed, detector, info, model, hosts, devices)
                recorder = recorder_for(life, about, session, detector, energy, "on" if moved else "resumed")
                if life.outage is not None and source is not None:
                    recorder.after(life.outage, self.number, source, life.state.step)
                life.outage = None
                if followers:
                    follow(session, followers)
                unsaved = None
                try:
                    outcome = self._train(session, data, checkpoints, recorder, detector)
                except LeavesUnsaved as error:
                    outcome, unsaved = Outcome.STOPPED, error
            if outcome in (Outcome.STOPPED, Outcome.RE_FORM):
                hand_over(life.state, plan, group, leaves=outcome is Outcome.STOPPED)
            if unsaved is not None:
                raise unsaved
            if outcome is not Outcome.RE_PLAN:
                return outcome
            assert detector is not None
            plan, moved = self._move(life.state, plan, detector, model)
            plan, followers = guard.allowed(plan), frozenset()

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
        """Say how replicas that take local steps agree, when the run starts here."""
        job = self.life.job
        if plan.local is not None and not self.life.begun:
            named = job.parallel.sync is not None and job.parallel.sync.names_the_optimizer
            for note in plan.local.notes(job.total_steps(-(-info.train // job.batch_size)), named):
                self.say(note)
            assert self.life.state is not None
            if any(isinstance(one, nn.SyncBatchNorm) for one in self.life.state.model.recorded.modules()):
                self.say(
                    "warning: nn.SyncBatchNorm normalises over the samples of a replica only, as replicas that take "
                    "local steps do not meet in every step"
                )

    def _session(self, plan: Plan, executions: Executions) -> Trainer:
        """Return a session of a plan on the state."""
        life = self.life
        assert life.state is not None
        assert life.info is not None
        if plan.local is None:
            life.state.forget_outer()
        task = task_for(life.job, life.info)
        return open_session(plan, life.state, self.group, task, life.job.batch_size, executions)

    def _load(self, session: Trainer) -> Data:
        """Return the data for this rank, of which all ranks know what cannot be read. Raises DataError."""
        life, info = self.life, self.life.info
        assert info is not None
        _check_smallest_batch(life.job, session, info)
        data = load_for(life, session, info)
        if life.job.data.corrupt == "skip" and info.unreadable is None:
            info = life.info = find_unreadable(life.job, session, data, self.say)
            life.data = Loaded(replace(data, info=info), session.is_first, session.is_last)
            data = life.data.data
        return data

    def _record_plan(
        self,
        plan: Plan,
        agreed: Agreed,
        detector: StragglerDetector | None,
        info: DataInfo,
        model: Model,
        hosts: list[Host],
        devices: list[dict[str, str]],
    ) -> None:
        """Write down, on rank 0, by which plan the group trains from now on, and what it was made of."""
        problem = detector.problem if detector is not None else agreed.problem
        used = problem or assumed_problem(
            self.life.job, model, info, hosts, untried(self.life.job, self.life.executions or ())
        )
        measured = problem is not None
        found = describe_planning(self.life, self.started_as, model, hosts, devices, plan, used, measured)
        record_planning(found, self.say)

    def _place(self) -> Place:
        return Place(self.group, self.started_as, self.say)

    def _agree_on_begin(self) -> tuple[bool, bool]:
        """Return whether no rank of this group has trained this run before, and whether it starts over.

        An earlier run is moved away only when the first step is about to be taken (see `_set_aside`). Raises JobError
        on all ranks if it must not be.
        """
        life, group = self.life, self.group
        begun = group.gather_json([life.moved_away, life.begun], fields(boolean, boolean))
        anew = any(group.gather_json(life.fresh, boolean)) and not any(moved for moved, _ in begun)
        if anew:
            life.fresh = True  # also for the next group, if this one ends before its first step

            def check() -> None:
                problem = foreign(life.job.run_folder)
                if problem is not None:
                    raise JobError(problem)

            group.agree(check)
        life.moved_away = not anew
        return not any(begun for _, begun in begun), anew

    def _set_aside(self, checkpoints: Checkpoints | None) -> None:
        """Move an earlier run away, now that data, model and plan are known to work. Raises JobError on all ranks."""
        life, group = self.life, self.group
        leads = Disks(life.job.run_folder, group).leads

        def move() -> str | None:
            problem = life.folder.set_aside() if leads[group.rank] == group.rank else None
            if problem is not None:
                raise JobError(problem)
            return str(life.folder.previous) if life.folder.previous is not None else None

        kept = group.agree(move, optional(text))
        life.moved_away = True
        if checkpoints is not None:
            checkpoints.begin_again()
        places = sorted({self.names[rank] for rank in set(leads) if kept[rank] is not None})
        if places:
            path, previous = life.job.run_folder, next(one for one in kept if one is not None)
            where = f" on {', '.join(places)}" if len(set(leads)) > 1 else ""
            self.say(
                f"the earlier run is kept in {previous}{where}, until the next --fresh. To go back to it: mv {path} "
                f"{path}.new && mv {previous} {path}"
            )

    def _use_threads(self, model: Model, hosts: list[Host], here: Host) -> None:
        """Choose how many threads this rank computes with; results depend on it, so a rank keeps its number."""
        life, group = self.life, self.group
        kept = group.gather_json(life.threads, optional(whole(1, _MOST_THREADS)))
        beside = next((kept[rank] for rank in here.ranks if kept[rank] is not None), None)
        threads = life.job.parallel.threads or beside
        if any(all(kept[rank] is None for rank in host.ranks) for host in hosts) and not life.job.parallel.threads:
            chosen = choose_threads(life.job, model, group, here)
            threads = threads or chosen
        assert threads is not None
        life.threads = threads
        torch.set_num_threads(threads)

    def _agree_on_plan(self, model: Model, info: DataInfo, hosts: list[Host], guard: Guard) -> Agreed:
        """Agree on a plan: one made for the same ranks before, if any, as another one ends elsewhere by rounding.

        A rank that does not know it takes it over from one that does.
        """
        life, group = self.life, self.group
        kept = life.plans.get(tuple(self.started_as))
        kept_by = group.gather_json(kept.to_json() if kept is not None else None, optional(Agreed.from_json))
        agreed = next((value for value in kept_by if value is not None), None)
        if agreed is None:
            measured = known(life, self.started_as)
            used = guard.executions().layers  # profiles are taken without bf16 as long as it is not allowed
            agreed = make_plan(life.job, model, info, group, hosts, self.names, self.say, measured, used)
            refuse_what_cannot_fit(agreed.plan, model, optimizer_copies(life.job), hosts, self.names)
            if agreed.measured is not None and agreed.measured is not measured:
                life.measured, life.measured_for = agreed.measured, self.started_as
        elif kept is not None and kept.to_json() == agreed.to_json():
            agreed = kept  # which, on rank 0, also knows the problem
        agreed.plan.check(len(model.chain), group.world_size)  # it may be another rank's
        life.agreed = life.plans[tuple(self.started_as)] = agreed
        return agreed

    def _plan_again(self, agreed: Agreed, plan: Plan, guard: Guard, model: Model, *, following: bool) -> Agreed:
        """Return what to train by where formats of the agreed plan may not be used, with layers where it has them."""
        state = self.life.state
        assert state is not None
        found = guard.plan_again(agreed, plan, search=state.tried is not None and not following)
        if state.tried is None or following:  # so the next group tries the plan itself
            return found
        moves = senders(holders(plan), found.plan)
        if moves or found.plan.stages != plan.stages:
            self.say("with these formats, another plan is better:")
            self.say(found.plan.describe(model.chain.names))
        moved = sum(self.group.gather_json(move(state, moves, self.group), whole())) if moves else 0
        if moved:
            self.say(f"{human_bytes(moved)} of parameters and optimizer state changed hands")
        self.life.agreed = self.life.plans[tuple(self.started_as)] = found
        return found

    def _detector(self, agreed: Agreed, guard: Guard) -> StragglerDetector | None:
        """Return what compares steps with the plan, if it is one that was predicted."""
        parallel = self.life.job.parallel
        if agreed.forecast is None or agreed.plan.local is not None:  # replicas do not compare their steps
            return None
        return StragglerDetector(
            self.group,
            agreed.plan,
            agreed.forecast,
            agreed.problem,
            parallel.replan_threshold,
            parallel.replans,
            self.life.condition,
            time.monotonic,
            guard.constraints,
            parallel.deadline_seconds,
            max(self.group.gather_json(time.monotonic() - (self.life.started or time.monotonic()), number)),
        )

    def _train(
        self,
        session: Trainer,
        data: Data,
        checkpoints: Checkpoints | None,
        recorder: Recorder,
        detector: StragglerDetector | None,
    ) -> Outcome:
        """Train by one plan, and close the record of it."""
        life, ended_as = self.life, "failed"
        life.last = None
        workers: Workers | None = None

        def mirror() -> Mirror | None:
            made = mirror_for(life, session, self._place())
            life.last = Last(self.number, self.started_as, made, session.executions) if made is not None else None
            return made

        try:
            life.started = life.started or time.monotonic()
            workers = life.workers_for(data, session.is_first, session.is_last)
            given = checkpoints, recorder, life.stop, self.newcomers, detector, mirror, workers
            outcome = train(life.job, session, data, *given)
            if life.last is not None and outcome is Outcome.RE_PLAN:
                life.last.mirror.finish()
                life.last = None  # what this plan's ranks have copied is of no use to the next one's
            ended_as = outcome.value
            doubt_profile(life, session, recorder)
            return outcome
        finally:
            if workers is not None and workers is not life.workers:
                workers.close()
            life.steps += recorder.steps
            recorder.close(ended_as)
            life.newest_checkpoint = checkpoints.newest if checkpoints is not None else None

    def _move(self, state: TrainState, plan: Plan, detector: StragglerDetector, model: Model) -> tuple[Plan, str]:
        """Bring layers to where a better plan has them; return that plan, and what to say of it."""
        predicted = human_seconds(detector.forecast.seconds)
        self.say(f"step {state.step}: a new plan, predicted to take {predicted} a step:")
        self.say(detector.plan.describe(model.chain.names))
        moved = sum(self.group.gather_json(move(state, senders(holders(plan), detector.plan), self.group), whole()))
        agreed = replace(self.life.agreed or Agreed(plan), plan=detector.plan, forecast=detector.forecast)
        agreed = replace(agreed, problem=detector.problem)  # of the devices as they are now
        self.life.agreed = self.life.plans[tuple(self.started_as)] = agreed
        return detector.plan, f"{human_bytes(moved)} of parameters and optimizer state changed hands"


def load_for(life: Life, session: Trainer, info: DataInfo) -> Data:
    """Return the data for this rank: inputs for the first stage, targets for the last, nothing in between.

    What an earlier group needed as well has been read already.
    """
    inputs, targets = session.is_first, session.is_last
    if life.data is None or (life.data.inputs, life.data.targets, life.data.data.info) != (inputs, targets, info):
        life.data = None  # frees the memory before more is read
        data = load(life.job.data, info, cache_folder() / "data", inputs=inputs, targets=targets)
        life.data = Loaded(data, inputs, targets)
    return life.data.data


def _check_smallest_batch(job: Job, session: Trainer, info: DataInfo) -> None:
    """BatchNorm cannot train on a single value per channel: say so now, not at the end of the first epoch."""
    for size in sorted({min(job.batch_size, info.train), info.train % job.batch_size} - {0}):
        for rank, problem in enumerate(session.group.gather_json(session.try_smallest(size), optional(text))):
            if problem is not None:
                raise DataError(
                    f"batch_size: a batch of {size} samples (of {info.train}) leaves rank {rank} with one sample, on "
                    f"which this model cannot train ({problem}); change batch_size, data.samples, or "
                    "parallel.micro_batches"
                )


def use_executions(
    life: Life, group: Group, model: Model, info: DataInfo, hosts: Sequence[Host], say: Callable[[str], None]
) -> Executions:
    """Return how this rank runs each layer; all ranks call this together.

    Results depend on it, as they do on the number of threads, so a rank keeps its choice, and one that is new on a
    machine takes over that of the others there.
    """

    def read(value: Any) -> tuple[Execution, ...] | None:
        return None if value is None else read_layers(model, value)

    kept = group.gather_json(None if life.executions is None else to_json(life.executions), read)
    here = next(host for host in hosts if group.rank in host.ranks)
    own = next((kept[rank] for rank in (group.rank, *here.ranks) if kept[rank] is not None), None)
    if any(all(kept[rank] is None for rank in host.ranks) for host in hosts):
        steps = life.job.total_steps(-(-info.train // life.job.batch_size))
        job, why = life.job, why_untried(life.job, info)
        if job.precision == "auto" and why is not None:
            say(f"precision: auto: layers are computed in fp32, as {why}")
            job = job.model_copy(update={"precision": "fp32"})
        chosen = choose_executions(job, model, group, here, steps, say)
        own = own or chosen
    assert own is not None
    everyone = [layers or () for layers in group.gather_json(to_json(own), read)]
    unused = unused_bf16(life.job, everyone) if life.executions is None else None
    if unused is not None:
        say(unused)
    life.executions = own
    return Executions.among(own, everyone)
