"""Runs one rank: it meets the others, agrees on a plan, trains, and meets them again when one of them is lost."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from horizonml.comm.group import Group
from horizonml.data.dataset import Data, DataInfo
from horizonml.data.images import ImageInfo, load
from horizonml.engine.session import Session
from horizonml.errors import DataError, HorizonError, JobError, PeerLost, is_out_of_memory
from horizonml.files import cache_folder
from horizonml.job.schema import Job
from horizonml.machine.energy import EnergyMeter
from horizonml.machine.host import machine_id, machine_info, shared_machine, versions
from horizonml.machine.memory import keep_freed_memory
from horizonml.machine.resources import available_cores, memory_limit
from horizonml.machine.signals import Cancelled, StopRequest
from horizonml.machine.usage import rss_bytes
from horizonml.models.zoo import Model
from horizonml.planner.hardware import Host
from horizonml.profiling.threads import choose_threads
from horizonml.rendezvous.identity import Identity
from horizonml.rendezvous.meeting import RendezvousSettings, meet
from horizonml.rendezvous.membership import Membership
from horizonml.rendezvous.messages import Departure
from horizonml.runtime.agreement import Agreed, describe_together, make_plan
from horizonml.runtime.outcome import Outcome
from horizonml.runtime.stragglers import StragglerDetector
from horizonml.runtime.trainer import train
from horizonml.state.checkpoint import Checkpoints
from horizonml.state.disks import Disks
from horizonml.state.equal import share_state
from horizonml.state.move import move
from horizonml.state.runfolder import RunFolder
from horizonml.state.shards import completed
from horizonml.state.train_state import TrainState
from horizonml.tasks.choose import task_for
from horizonml.telemetry.metrics import Metrics
from horizonml.telemetry.progress import display_for
from horizonml.telemetry.record import RunInfo
from horizonml.telemetry.recorder import Recorder
from horizonml.text import count, human_bytes, human_seconds


class Worker:
    """Represents one rank of a job, through all the groups of which it is a member."""

    def __init__(
        self, job: Job, identity: Identity, address: tuple[str, int] | None, metrics: Metrics, stop: StopRequest
    ) -> None:
        """Prepare the rank; `address` is the rendezvous service's, or None for a world size of 1."""
        self._job, self._identity, self._address = job, identity, address
        self._metrics, self._stop = metrics, stop
        self._idle = rss_bytes()
        self._steps = 0  # done by this process
        metrics.wanted(identity.world_size)
        self._rank = identity.rank  # in the current group, or in the last one
        self._agreed: Agreed | None = None
        self._state: TrainState | None = None  # outlives all groups
        self._info: ImageInfo | None = None  # of the data that the state is for
        # Set once all ranks have agreed on it: the earlier run is moved away, and this one begins, only once.
        self._moved_away = self._begun = False
        self._planned_for: list[int] = []  # the ranks, as they were started, for which the plan was agreed on
        self.newest_checkpoint: int | None = None

    def run(self, fresh: bool, rejoin: bool) -> Outcome:
        """Train until the end. Raises HorizonError.

        With `rejoin`, when another rank is lost or stops, this rank meets the others again and goes on from the newest
        checkpoint; without it, this rank ends, too.
        """
        keep_freed_memory()
        job, identity = self._job, self._identity
        self._folder = RunFolder(job.run_folder, identity.rank, job.name, job.checkpoint.enabled)
        if not fresh and completed(job.run_folder / "checkpoints", job):
            return Outcome.ALREADY_COMPLETE
        if identity.world_size == 1:
            return self._train(None, fresh)
        membership, fruitless = None, 0
        settings = RendezvousSettings(
            job.name,
            job.digest(),
            job.rendezvous.timeout,
            job.rendezvous.replace_timeout,
            job.parallel.min_world_size(),
        )
        while not self._stop.wanted:
            before = self._steps
            assert self._address is not None
            try:
                membership = meet(identity, settings, self._address, self, membership, lambda: self._stop.wanted)
            except Cancelled:
                return Outcome.STOPPED_WAITING
            self._rank = membership.rank
            try:
                outcome = self._train(membership, fresh)
            except PeerLost as error:
                named = membership.name_lost(error)
                membership.leave(f"lost a peer: {named}", Departure.LOST_PEER)
                self._metrics.lost_peer()
                fruitless = 0 if self._steps > before else fruitless + 1
                if self._stop.wanted:
                    break
                if not rejoin or named.ends_job or fruitless >= job.rendezvous.max_attempts:
                    raise named from error
                self._check_recoverable(str(named))
                print(f"rank {identity.rank}: {named}; meeting the others again", file=sys.stderr, flush=True)
            except BaseException as error:
                # An error in the code of the model or the data would occur again; a lack of memory might not.
                passing = isinstance(error, (OSError, KeyboardInterrupt, SystemExit)) or is_out_of_memory(error)
                failed = error.ends_job if isinstance(error, HorizonError) else not passing
                membership.leave(str(error) or type(error).__name__, Departure.FAILED if failed else Departure.OTHER)
                raise
            else:
                membership.leave("done" if outcome is not Outcome.RE_FORM else "meets again")
                if outcome is not Outcome.RE_FORM:
                    return outcome
                if not rejoin:
                    break
                self._check_recoverable("another rank stops")
                self.say("another rank stops or joins; meeting again")
            self._metrics.waiting([])
        return Outcome.STOPPED

    def _check_recoverable(self, reason: str) -> None:
        """Raise PeerLost if there is nothing from which training could go on."""
        if not self._job.checkpoint.enabled and self._steps:
            raise PeerLost(
                f"{reason}; the {self._steps} steps done so far are lost, because checkpoint.enabled is false: with "
                "checkpoints the others would go on"
            )

    def say(self, text: str) -> None:
        """Show a message, if this is rank 0 of the group."""
        if self._rank == 0:
            self.say_waiting(text)

    def say_waiting(self, text: str) -> None:
        """Show a message about what this rank waits for; every rank does."""
        prefix = f"rank {self._identity.rank}: " if self._identity.rank else ""
        print(prefix + text, file=sys.stderr if self._rank else sys.stdout, flush=True)

    def waiting(self, ranks: Sequence[int]) -> None:
        """Show that these ranks have not arrived yet."""
        self._metrics.waiting(ranks)

    def _train(self, membership: Membership | None, fresh: bool) -> Outcome:
        """Train as a member of one group."""
        rank = membership.rank if membership else 0
        nodes = [member.host_id for member in membership.members] if membership else [machine_id()]
        names = [member.hostname for member in membership.members] if membership else [socket.gethostname()]
        started_as = [member.rank for member in membership.members] if membership else [self._identity.rank]
        store = membership.store if membership else None
        group = Group(store, rank, len(nodes), self._job.rendezvous.step_timeout, nodes)
        generation = membership.generation if membership else 0
        self._metrics.formed(generation, group.world_size)

        def newcomers() -> bool:  # newcomers wait if admitting them would lose all progress
            return membership is not None and self._job.checkpoint.enabled and bool(membership.newcomers)

        try:
            return self._train_in(group, names, started_as, generation, newcomers, fresh)
        finally:
            group.close()

    def _train_in(
        self,
        group: Group,
        names: list[str],
        started_as: list[int],
        generation: int,
        newcomers: Callable[[], bool],
        fresh: bool,
    ) -> Outcome:
        """Train as a member of `group`."""
        job, rank = self._job, group.rank
        if group.world_size < self._identity.world_size:
            self.say(f"going on with {group.world_size} of {self._identity.world_size} ranks")
        hosts = find_hosts(group)
        here = next(host for host in hosts if rank in host.ranks)
        began = group.gather_json([self._moved_away, self._begun])
        if any(group.gather_json(fresh)) and not any(moved for moved, _ in began):
            self._set_aside(group)
        self._moved_away = True
        first = not any(begun for _, begun in began)  # no rank of this group has trained this run before
        info, model = describe_together(job, group)
        torch.set_num_threads(job.parallel.threads or choose_threads(job, model, group, here))
        agreed = self._agree(group, model, info, hosts, names, started_as)
        watch = None
        if agreed.forecast is not None:
            parallel = job.parallel
            watch = StragglerDetector(
                group, agreed.plan, agreed.forecast, agreed.problem, parallel.replan_threshold, parallel.replan
            )
        if self._state is None or info != self._info:
            self._state, self._info = TrainState(model, job.optimizer), info
        state = self._state
        session = Session(agreed.plan, state, group, task_for(job), job.batch_size)
        _check_smallest_batch(job, session, info)
        data = load_for(job, session, info)
        checkpoints, found = None, None
        if job.checkpoint.enabled:
            checkpoints = Checkpoints(
                job.run_folder / "checkpoints", group, job.checkpoint.keep, compatible_with(job, info), names
            )
            if first and not job.checkpoint.resume:
                checkpoints.set_aside()
            else:
                found = checkpoints.resume(state, agreed.plan)
        if found is None and state.step:
            state.restart()
        self._begun = True
        self._begin_equal(session)
        if not first and found is None:
            self.say("no checkpoint had been saved: training begins again at step 0")
        steps = job.epochs * -(-info.train // job.batch_size)
        about = RunInfo(
            rank=rank,
            started_as_rank=self._identity.rank,
            world_size=group.world_size,
            generation=generation,
            host=names[rank],
            node=group.hosts[rank],
            job=job,
            layers=model.chain.names,
            rss_idle_bytes=self._idle,
            threads=torch.get_num_threads(),
            cores=here.cores,
            memory=memory_limit(),
            machine=machine_info().to_json(),
            versions=versions(),
            plan=agreed.plan,
        )
        energy = EnergyMeter() if here.ranks[0] == rank else None
        source = "resumed"
        while True:
            recorder = self._recorder(about, session, watch, steps, source, energy)
            outcome = "failed"
            try:
                result = train(job, session, data, checkpoints, recorder, self._stop, newcomers, watch)
                outcome = result.value
            finally:
                session.close()
                self._steps += recorder.steps
                recorder.close(outcome)
                self.newest_checkpoint = checkpoints.newest if checkpoints is not None else None
            if result is not Outcome.RE_PLAN:
                return result
            assert watch is not None
            predicted = human_seconds(watch.forecast.seconds)
            self.say(f"step {state.step}: a new plan, predicted to take {predicted} a step:")
            self.say(watch.plan.describe(model.chain.names))
            moved = sum(group.gather_json(move(state, session.plan, watch.plan, group)))
            session = Session(watch.plan, state, group, task_for(job), job.batch_size)
            _check_smallest_batch(job, session, info)
            self.say(f"{human_bytes(moved)} of parameters and optimizer state changed hands")
            source = "on"
            self._agreed = Agreed(watch.plan, watch.forecast, watch.problem)
            data = load_for(job, session, info)

    def _set_aside(self, group: Group) -> None:
        """Make room for a fresh run, keeping the earlier one beside it on every disk. Raises JobError on all ranks."""
        leads = Disks(self._job.run_folder, group).leads

        def set_aside() -> None:
            problem = self._folder.set_aside() if leads[group.rank] == group.rank else None
            if problem is not None:
                raise JobError(problem)

        group.agree(set_aside)

    def _agree(
        self,
        group: Group,
        model: Model,
        info: DataInfo,
        hosts: list[Host],
        names: list[str],
        started_as: list[int],
    ) -> Agreed:
        """Return the plan, which is the earlier one if the ranks are the same; another plan would round differently.

        A rank that was replaced takes the plan over from a rank that has it.
        """
        kept = self._agreed if self._planned_for == started_as else None
        known = group.gather_json(kept.to_json() if kept is not None else None)
        agreed = next((Agreed.from_json(value) for value in known if value is not None), None)
        if agreed is None:
            agreed = make_plan(self._job, model, info, group, hosts, names, self.say)
        elif kept is not None and kept.to_json() == agreed.to_json():
            agreed = kept  # on rank 0, this one also has the problem
        self._agreed, self._planned_for = agreed, started_as
        return agreed

    def _begin_equal(self, session: Session) -> None:
        """Ensure that all members of a stage begin with the same state, bit for bit."""
        for rank, name in share_state(session.state, session.plan, session.group):
            self.say(
                f"warning: rank {rank} began with other values than its stage's first member ({name}, for one) and has "
                "taken over that member's; processors that round differently can be the reason"
            )

    def _recorder(
        self,
        about: RunInfo,
        session: Session,
        watch: StragglerDetector | None,
        steps: int,
        source: str,
        energy: EnergyMeter | None,
    ) -> Recorder:
        """Return a recorder of everything that happens from now on with this plan."""
        job, done, plan = self._job, session.state.step, session.plan
        display = display_for(about.rank, job.epochs, steps, done)
        forecast = watch.forecast.seconds if watch else None
        about = replace(about, plan=plan, forecast=forecast, resumed_at=done)
        file = job.run_folder / f"rank-{self._identity.rank}.jsonl"
        recorder = Recorder(file, display, about, job.telemetry.timeline_every, self._metrics, energy)
        self._metrics.started(about, job.epochs, steps, done)
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
                f"rank {self._identity.rank}: connected to {others}; trains {'; '.join(held)}, from step {done} of "
                f"{steps}",
                flush=True,
            )
        return recorder


def find_hosts(group: Group) -> list[Host]:
    """Return the machines and containers of a group, with what each of its ranks may use there."""
    nodes, rank = group.hosts, group.rank
    # The memory that the process itself takes is not available to the model.
    own = memory_limit() / nodes.count(nodes[rank]) - rss_bytes()
    limits = group.gather_json([available_cores(), own, *shared_machine()])
    machines = {node: str(limits[nodes.index(node)][2]) for node in nodes}
    hosts = []
    for node in dict.fromkeys(nodes):
        cores, memory, machine_, machine_cores = limits[nodes.index(node)]
        shared = sum(other == machine_ for other in machines.values()) > 1
        ranks = tuple(rank for rank, other in enumerate(nodes) if other == node)
        place = (str(machine_), float(machine_cores)) if shared else ()
        hosts.append(Host(ranks, float(cores), float(memory), *place))
    return hosts


def load_for(job: Job, session: Session, info: ImageInfo) -> Data:
    """Return the data that this rank needs: inputs for the first stage, targets for the last, and nothing between."""
    return load(job.data, info, cache_folder() / "data", inputs=session.is_first, targets=session.is_last)


def compatible_with(job: Job, info: DataInfo) -> dict[str, Any]:
    """Return what a checkpoint must agree with to be resumed."""
    return {
        "model": job.model.model_dump(),
        "data": job.data.name,
        "samples": info.train,
        "seed": job.seed,
        "batch_size": job.batch_size,
        "optimizer": job.optimizer.name,
    }


def _check_smallest_batch(job: Job, session: Session, info: DataInfo) -> None:
    """Raise an error now, not at the end of the first epoch, if BatchNorm would get one value per channel."""
    for size in sorted({min(job.batch_size, info.train), info.train % job.batch_size} - {0}):
        for rank, problem in enumerate(session.group.gather_json(session.try_smallest(size))):
            if problem is not None:
                raise DataError(
                    f"batch_size: a batch of {size} samples (of {info.train}) leaves rank {rank} with one sample, on "
                    f"which this model cannot train ({problem}); change batch_size, data.samples, or "
                    "parallel.micro_batches"
                )
