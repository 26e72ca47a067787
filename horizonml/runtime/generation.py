"""What a rank does as a member of one group: agree on a plan, take up the state, and train until the group ends."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from horizonml.comm.group import Group
from horizonml.data.choose import load
from horizonml.data.dataset import Data, DataInfo
from horizonml.engine.session import Session
from horizonml.errors import DataError, JobError, PeerLost
from horizonml.files import cache_folder
from horizonml.job.schema import Job
from horizonml.machine.energy import EnergyMeter
from horizonml.machine.host import machine_info, versions
from horizonml.machine.resources import memory_limit
from horizonml.machine.usage import rss_bytes
from horizonml.models.zoo import Model
from horizonml.plan.plan import Plan
from horizonml.planner.hardware import Host
from horizonml.profiling.threads import choose_threads
from horizonml.runtime.agreement import Agreed, agree_on_model, describe_data, make_plan, optimizer_copies
from horizonml.runtime.capacity import find_hosts, refuse_what_cannot_fit
from horizonml.runtime.joining import Place, follow
from horizonml.runtime.life import Last, Life, Loaded
from horizonml.runtime.outcome import LeavesUnsaved, Outcome
from horizonml.runtime.recovery import hand_over, known, mirror_for, recover
from horizonml.runtime.stragglers import StragglerDetector
from horizonml.runtime.trainer import train
from horizonml.runtime.unreadable import find_unreadable
from horizonml.state.checkpoint import Checkpoints
from horizonml.state.disks import Disks
from horizonml.state.equal import share_state
from horizonml.state.mirror import Mirror
from horizonml.state.move import holders, move, senders
from horizonml.state.recover import agree_on_state
from horizonml.state.train_state import TrainState
from horizonml.tasks.choose import task_for
from horizonml.telemetry.progress import display_for
from horizonml.telemetry.record import RunInfo, Source
from horizonml.telemetry.recorder import Recorder
from horizonml.text import count, human_bytes, human_seconds


@dataclass
class Generation:
    """One group, of which this rank is a member."""

    life: Life
    group: Group
    number: int  # counts the formations of the group
    names: list[str]  # of the ranks' machines
    started_as: list[int]  # the rank that each member was started as
    newcomers: Callable[[], bool]  # whether ranks wait that can be taken in
    say: Callable[[str], None]  # tells the user, on rank 0

    def run(self) -> Outcome:
        """Train as a member of the group. Raises HorizonError."""
        life, job, group = self.life, self.life.job, self.group
        if group.world_size < life.world_size:
            self.say(f"going on with {group.world_size} of {life.world_size} ranks")
        if life.taken is None:
            life.taken = rss_bytes()
        hosts = find_hosts(group, life.taken)
        first = self._agree_on_begin()
        info = describe_data(job, group, life.info)
        known = life.state.model if life.state is not None and info == life.info else None
        model, notes = agree_on_model(job, info, group, known)
        if life.state is None or model is not known:
            life.state, life.info = TrainState(model, job.optimizer, job.ema), info
        for note in notes if not life.begun else ():
            self.say(note)
        found = agree_on_state(life.state, life.begun, group)
        here = next(host for host in hosts if group.rank in host.ranks)
        self._use_threads(model, hosts, here)
        agreed = self._agree_on_plan(model, info, hosts)
        source, followers, checkpoints = None, frozenset[int](), self._checkpoints(info, model)
        if found is not None and not self._is_older_than_disk(found.step, checkpoints):
            source, followers = recover(life, info, found, agreed.plan, self._place())
        detector = self._detector(agreed)
        energy = EnergyMeter() if here.ranks[0] == group.rank else None
        about = self._about(model, agreed.plan, here)
        plan, moved = agreed.plan, ""  # what to say after a move
        while True:
            with closing(Session(plan, life.state, group, task_for(job, info), job.batch_size)) as session:
                _check_smallest_batch(job, session, info)
                data = load_for(life, session, info)
                if job.data.corrupt == "skip" and info.unreadable is None:
                    info = life.info = find_unreadable(job, session, data, self.say)
                    life.data = Loaded(replace(data, info=info), session.is_first, session.is_last)
                    data = life.data.data
                if moved:
                    self.say(moved)
                else:
                    source = self._take_up(session, checkpoints, first, source, followers)
                recorder = self._recorder(about, session, detector, energy, "on" if moved else "resumed")
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
            followers = frozenset()

    def _place(self) -> Place:
        return Place(self.group, self.started_as, self.say)

    def _agree_on_begin(self) -> bool:
        """Return whether no rank of this group has trained this run before; move an earlier run away, if that is asked.

        Raises JobError on all ranks.
        """
        life, group = self.life, self.group
        begun = group.gather_json([life.moved_away, life.begun])
        if any(group.gather_json(life.fresh)) and not any(moved for moved, _ in begun):
            leads = Disks(life.job.run_folder, group).leads

            def set_aside() -> None:
                problem = life.folder.set_aside() if leads[group.rank] == group.rank else None
                if problem is not None:
                    raise JobError(problem)

            group.agree(set_aside)
        life.moved_away = True
        return not any(begun for _, begun in begun)

    def _use_threads(self, model: Model, hosts: list[Host], here: Host) -> None:
        """Choose how many threads this rank computes with; results depend on it, so a rank keeps its number."""
        life, group = self.life, self.group
        kept = group.gather_json(life.threads)
        beside = next((kept[rank] for rank in here.ranks if kept[rank] is not None), None)
        threads = life.job.parallel.threads or beside
        if any(all(kept[rank] is None for rank in host.ranks) for host in hosts) and not life.job.parallel.threads:
            chosen = choose_threads(life.job, model, group, here)
            threads = threads or chosen
        assert threads is not None
        life.threads = threads
        torch.set_num_threads(threads)

    def _agree_on_plan(self, model: Model, info: DataInfo, hosts: list[Host]) -> Agreed:
        """Agree on a plan: one made for the same ranks before, if any, as another one ends elsewhere by rounding.

        A rank that does not know it takes it over from one that does.
        """
        life, group = self.life, self.group
        kept = life.plans.get(tuple(self.started_as))
        kept_by = group.gather_json(kept.to_json() if kept is not None else None)
        agreed = next((Agreed.from_json(value) for value in kept_by if value is not None), None)
        if agreed is None:
            measured = known(life, self.started_as)
            agreed = make_plan(life.job, model, info, group, hosts, self.names, self.say, measured)
            refuse_what_cannot_fit(agreed.plan, model, optimizer_copies(life.job), hosts, self.names)
            if agreed.measured is not None and agreed.measured is not measured:
                life.measured, life.measured_for = agreed.measured, self.started_as
        elif kept is not None and kept.to_json() == agreed.to_json():
            agreed = kept  # which, on rank 0, also knows the problem
        life.agreed = life.plans[tuple(self.started_as)] = agreed
        return agreed

    def _is_older_than_disk(self, step: int, checkpoints: Checkpoints | None) -> bool:
        """Return whether a checkpoint is newer than the newest state in memory, which is dropped then.

        That happens if all ranks that held a newer state are lost, and one that was lost long before them is back.
        """
        newer = checkpoints.newer_than(step) if checkpoints is not None else None
        if newer is None:
            return False
        assert self.life.state is not None
        self.life.state.drop()
        self.say(f"the state in memory is that of step {step}: going on from the checkpoint of step {newer} instead")
        return True

    def _detector(self, agreed: Agreed) -> StragglerDetector | None:
        """Return what compares steps with the plan, if it is one that was predicted."""
        parallel = self.life.job.parallel
        if agreed.forecast is None:
            return None
        return StragglerDetector(
            self.group, agreed.plan, agreed.forecast, agreed.problem, parallel.replan_threshold, parallel.replan
        )

    def _checkpoints(self, info: DataInfo, model: Model) -> Checkpoints | None:
        """Return the run's checkpoints, if there are to be any. All ranks call this."""
        job = self.life.job
        if not job.checkpoint.enabled:
            return None
        folder = job.run_folder / "checkpoints"
        compatible = compatible_with(job, info, model)
        return Checkpoints(folder, self.group, job.checkpoint.keep, compatible, self.names, self.number)

    def _take_up(
        self,
        session: Session,
        checkpoints: Checkpoints | None,
        first: bool,
        source: Source | None,
        followers: frozenset[int],
    ) -> Source | None:
        """Bring the state to where training goes on: to a checkpoint, or to the beginning. Raises HorizonError.

        `source` says where it has been taken from already, if it has. Return where it was taken from, None if the run
        begins with this group.
        """
        life, state = self.life, session.state
        if source is not None and checkpoints is not None:
            known_steps = self.group.gather_json(life.newest_checkpoint)
            checkpoints.newest = max((step for step in known_steps if step is not None), default=None)
        if source is None:
            found = self._from_disk(session, checkpoints, first)
            source = None if first else Source.DISK if found else Source.START
        life.begun = True
        # All members of a stage that do not follow begin with the same state, bit for bit.
        for rank, name in share_state(state, session.plan.without(followers), self.group):
            self.say(
                f"warning: rank {rank} began with other values than its stage's first member ({name}, for one) and has "
                "taken over that member's; processors that round differently can be the reason"
            )
        return source

    def _from_disk(self, session: Session, checkpoints: Checkpoints | None, first: bool) -> bool:
        """Bring the state to the newest checkpoint, or to the beginning; return whether there was a checkpoint."""
        state, found = session.state, None
        if checkpoints is None:
            if not first:
                raise PeerLost(
                    "a lost rank alone held some of the layers, and no copy of them can be used; with checkpoints "
                    "(checkpoint.enabled: true) the others would go on from the newest one",
                    ends_job=True,
                )
        elif first and not self.life.job.checkpoint.resume:
            checkpoints.set_aside()
        else:
            found = checkpoints.resume(state, session.plan)
        if found is None and (state.step or not state.valid):
            state.restart()
        if not first and found is None:
            self.say("no checkpoint had been saved: training begins again at step 0")
        return found is not None

    def _train(
        self,
        session: Session,
        data: Data,
        checkpoints: Checkpoints | None,
        recorder: Recorder,
        detector: StragglerDetector | None,
    ) -> Outcome:
        """Train by one plan, and close the record of it."""
        life, ended_as = self.life, "failed"
        life.last = None

        def mirror() -> Mirror | None:
            made = mirror_for(life, session, self._place())
            life.last = Last(self.number, self.started_as, made) if made is not None else None
            return made

        try:
            outcome = train(life.job, session, data, checkpoints, recorder, life.stop, self.newcomers, detector, mirror)
            if life.last is not None and outcome is Outcome.RE_PLAN:
                life.last.mirror.finish()
                life.last = None  # what this plan's ranks have copied is of no use to the next one's
            ended_as = outcome.value
            return outcome
        finally:
            life.steps += recorder.steps
            recorder.close(ended_as)
            life.newest_checkpoint = checkpoints.newest if checkpoints is not None else None

    def _move(self, state: TrainState, plan: Plan, detector: StragglerDetector, model: Model) -> tuple[Plan, str]:
        """Bring layers to where a better plan has them; return that plan, and what to say of it."""
        predicted = human_seconds(detector.forecast.seconds)
        self.say(f"step {state.step}: a new plan, predicted to take {predicted} a step:")
        self.say(detector.plan.describe(model.chain.names))
        moved = sum(self.group.gather_json(move(state, senders(holders(plan), detector.plan), self.group)))
        agreed = replace(self.life.agreed or Agreed(plan), plan=detector.plan, forecast=detector.forecast)
        self.life.agreed = self.life.plans[tuple(self.started_as)] = agreed
        return detector.plan, f"{human_bytes(moved)} of parameters and optimizer state changed hands"

    def _about(self, model: Model, plan: Plan, here: Host) -> RunInfo:
        """Return what the records of this rank begin with."""
        group, life = self.group, self.life
        return RunInfo(
            rank=group.rank,
            started_as_rank=life.rank,
            world_size=group.world_size,
            generation=self.number,
            host=self.names[group.rank],
            node=group.hosts[group.rank],
            job=life.job,
            layers=model.chain.names,
            rss_idle_bytes=life.idle,
            threads=torch.get_num_threads(),
            cores=here.cores,
            memory=memory_limit(),
            machine=machine_info().to_json(),
            versions=versions(),
            plan=plan,
            unigram=life.info.unigram if life.info is not None else None,
        )

    def _recorder(
        self,
        about: RunInfo,
        session: Session,
        detector: StragglerDetector | None,
        energy: EnergyMeter | None,
        source: str,
    ) -> Recorder:
        """Return what takes down all that happens from now on, by this plan."""
        life, job, plan, done = self.life, self.life.job, session.plan, session.state.step
        assert life.info is not None
        per_epoch = -(-life.info.train // job.batch_size)
        steps, epochs = job.total_steps(per_epoch), job.total_epochs(per_epoch)
        display = display_for(about.rank, epochs, steps, done, life.observer, about.unigram)
        forecast = detector.forecast if detector is not None else None
        expected = (
            (life.taken or life.idle) + forecast.memory[about.rank]
            if forecast is not None and forecast.memory
            else None
        )
        life.lifeline.expected(expected)
        seconds = forecast.seconds if forecast is not None else None
        about = replace(about, plan=plan, forecast=seconds, resumed_at=done, expected_memory=expected)
        file = job.run_folder / f"rank-{life.rank}.jsonl"
        feeds = life.feeds if about.rank == 0 else None
        every = job.telemetry.timeline_every
        recorder = Recorder(file, display, about, every, life.metrics, energy, life.lifeline, feeds)
        life.metrics.started(about, epochs, steps, done)
        if 0 < done < steps:
            recorder.message(f"{source} from step {done} of {steps}")
        if about.rank:
            others = count(about.world_size - 1, "other rank")
            held = [
                f"stage {number + 1} of {len(plan.stages)}, layers {plan.stages[number].start} to "
                f"{plan.stages[number].stop - 1}"
                for number in session.stages
            ]
            print(
                f"rank {life.rank}: connected to {others}; trains {'; '.join(held)}, from step {done} of {steps}",
                flush=True,
            )
        return recorder


def load_for(life: Life, session: Session, info: DataInfo) -> Data:
    """Return the data for this rank: inputs for the first stage, targets for the last, nothing in between.

    What an earlier group needed as well has been read already.
    """
    inputs, targets = session.is_first, session.is_last
    if life.data is None or (life.data.inputs, life.data.targets, life.data.data.info) != (inputs, targets, info):
        life.data = None  # frees the memory before more is read
        data = load(life.job.data, info, cache_folder() / "data", inputs=inputs, targets=targets)
        life.data = Loaded(data, inputs, targets)
    return life.data.data


def compatible_with(job: Job, info: DataInfo, model: Model) -> dict[str, Any]:
    """What a checkpoint must agree with so that going on from it makes sense."""
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


def _check_smallest_batch(job: Job, session: Session, info: DataInfo) -> None:
    """BatchNorm cannot train on a single value per channel: say so now, not at the end of the first epoch."""
    for size in sorted({min(job.batch_size, info.train), info.train % job.batch_size} - {0}):
        for rank, problem in enumerate(session.group.gather_json(session.try_smallest(size))):
            if problem is not None:
                raise DataError(
                    f"batch_size: a batch of {size} samples (of {info.train}) leaves rank {rank} with one sample, on "
                    f"which this model cannot train ({problem}); change batch_size, data.samples, or "
                    "parallel.micro_batches"
                )
