"""The life of one rank: meet the others, agree on a plan, train, leave; or meet again when one of them is lost."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from horizonml.agreement import describe_together, make_plan
from horizonml.checkpoint import Checkpoints
from horizonml.cluster.device import (
    available_cores,
    machine,
    memory_limit,
    shared_machine,
    versions,
)
from horizonml.cluster.identity import Identity
from horizonml.cluster.meeting import Membership, Terms, meet
from horizonml.data.datasets import Data, DataInfo, load
from horizonml.drift import Watch
from horizonml.engine.engine import Engine
from horizonml.engine.group import Group
from horizonml.engine.memory import keep_freed_memory
from horizonml.engine.move import move
from horizonml.engine.threads import choose_threads
from horizonml.errors import CheckpointError, DataError, PeerLost
from horizonml.files import cache_folder
from horizonml.job import Job
from horizonml.model.zoo import Model
from horizonml.plan.hardware import Host
from horizonml.plan.plan import Plan
from horizonml.shards import completed
from horizonml.signals import Cancelled, StopRequest
from horizonml.telemetry.energy import EnergyMeter
from horizonml.telemetry.metrics import Metrics
from horizonml.telemetry.progress import display_for
from horizonml.telemetry.recorder import Recorder
from horizonml.telemetry.usage import rss_bytes
from horizonml.text import human_bytes, human_seconds
from horizonml.trainer import Outcome, train


class Worker:
    """One rank of a job, through all the groups it is a member of."""

    def __init__(
        self, job: Job, identity: Identity, address: tuple[str, int] | None, metrics: Metrics, stop: StopRequest
    ) -> None:
        """`address` is the rendezvous service's; None for a world of one."""
        self._job, self._identity, self._address = job, identity, address
        self._metrics, self._stop = metrics, stop
        self._idle = rss_bytes()
        self._steps = 0  # done by this process
        metrics.wanted(identity.world_size)

    def run(self, fresh: bool, rejoin: bool) -> Outcome:
        """Train to the end. Raises HorizonError.

        With `rejoin`, when another rank is lost or stops, this one meets the others again and goes on from the newest
        checkpoint; otherwise that ends it, too.
        """
        keep_freed_memory()
        job, identity = self._job, self._identity
        if job.checkpoint.enabled:
            _check_writable(job.run_folder)
        if not fresh and completed(job.run_folder / "checkpoints", job):
            return "already complete"
        if identity.world_size == 1:
            return self._train(None, fresh)
        membership, fruitless = None, 0
        terms = Terms(
            job.name,
            job.digest(),
            job.rendezvous.timeout,
            job.rendezvous.replace_timeout,
            job.parallel.fewest(),
        )
        while not self._stop.wanted:
            before = self._steps
            assert self._address is not None
            try:
                membership = meet(identity, terms, self._address, self, membership, lambda: self._stop.wanted)
            except Cancelled:
                return "stopped waiting"
            try:
                outcome = self._train(membership, fresh)
            except PeerLost as error:
                _let_go(error)
                named = membership.name_lost(error)
                membership.leave(f"lost a peer: {named}")
                self._metrics.lost_peer()
                fruitless = 0 if self._steps > before else fruitless + 1
                if self._stop.wanted:
                    break
                if not rejoin or fruitless >= job.rendezvous.max_attempts:
                    raise named from error
                print(f"rank {identity.rank}: {named}; meeting the others again", file=sys.stderr, flush=True)
            except BaseException as error:
                membership.leave(str(error) or type(error).__name__)
                raise
            else:
                membership.leave("done" if outcome != "re-form" else "meets again")
                if outcome != "re-form":
                    return outcome
                if not rejoin:
                    break
                self.say("another rank stops or joins; meeting again")
            gc.collect()
            self._metrics.waiting([])
            fresh = False
        return "stopped"

    def say(self, text: str) -> None:
        """Tell the user; only what is being waited for is told by every rank."""
        rank = self._identity.rank
        if rank == 0 or text.startswith("waiting"):
            print(f"rank {rank}: {text}" if rank else text, file=sys.stderr if rank else sys.stdout, flush=True)

    def waiting(self, ranks: list[int]) -> None:
        """These ranks have not come yet."""
        self._metrics.waiting(ranks)

    def _train(self, membership: Membership | None, fresh: bool) -> Outcome:
        """Train as a member of one group."""
        rank = membership.rank if membership else 0
        hosts = [member.host for member in membership.members] if membership else [socket.gethostname()]
        store = membership.store if membership else None
        group = Group(store, rank, len(hosts), self._job.rendezvous.step_timeout, hosts)
        generation = membership.generation if membership else 0
        self._metrics.formed(generation, group.world_size)
        newcomers = (lambda: bool(membership.newcomers)) if membership else lambda: False
        try:
            return self._train_in(group, hosts, generation, newcomers, fresh)
        finally:
            group.close()

    def _train_in(
        self, group: Group, names: list[str], generation: int, newcomers: Callable[[], bool], fresh: bool
    ) -> Outcome:
        job, rank = self._job, group.rank
        # What the process itself takes is not there for the model.
        own = memory_limit() / names.count(names[rank]) - rss_bytes()
        limits = group.gather_json([available_cores(), own, *shared_machine()])
        machines = {name: str(limits[names.index(name)][2]) for name in names}
        hosts = []
        for name in dict.fromkeys(names):
            cores, memory, machine_, machine_cores = limits[names.index(name)]
            shared = sum(other == machine_ for other in machines.values()) > 1
            ranks = tuple(rank for rank, other in enumerate(names) if other == name)
            place = (str(machine_), float(machine_cores)) if shared else ()
            hosts.append(Host(ranks, float(cores), float(memory), *place))
        here = next(host for host in hosts if rank in host.ranks)
        if fresh:
            _set_aside(job.run_folder, group, first_here=here.ranks[0] == rank)
        info, model = describe_together(job, group)
        torch.set_num_threads(job.parallel.threads or choose_threads(job, model, group, here))
        agreed = make_plan(job, model, info, group, hosts, self.say)
        watch = None
        if agreed.forecast is not None:
            parallel = job.parallel
            watch = Watch(
                group, agreed.plan, agreed.forecast, agreed.problem, parallel.replan_threshold, parallel.replan
            )
        engine = engine_for(job, agreed.plan, model, group)
        _check_smallest_batch(job, engine, info)
        data = load_for(job, engine, info)
        checkpoints = resumed = None
        if job.checkpoint.enabled:
            checkpoints = Checkpoints(
                job.run_folder / "checkpoints", group, names, job.checkpoint.keep, compatible_with(job, info)
            )
            resumed = checkpoints.resume(engine) if job.checkpoint.resume else None
        steps = job.epochs * -(-info.train // job.batch_size)
        about = {
            "rank": rank,
            "started_as_rank": self._identity.rank,
            "world_size": group.world_size,
            "generation": generation,
            "host": names[rank],
            "job": job.model_dump(),
            "layers": model.chain.names,
            "rss_idle_bytes": self._idle,
            "threads": torch.get_num_threads(),
            "cores": here.cores,
            "memory": memory_limit(),
            "machine": machine(),
            "versions": versions(),
        }
        energy = EnergyMeter() if here.ranks[0] == rank else None
        while True:
            recorder = self._recorder(about, engine, watch, steps, resumed, energy)
            outcome: str = "failed"
            try:
                result, reached = train(job, engine, data, checkpoints, recorder, resumed, self._stop, newcomers, watch)
                outcome = result
            finally:
                self._steps += recorder.steps
                recorder.close(outcome)
            if result != "re-plan":
                return result
            assert watch is not None
            predicted = human_seconds(watch.forecast.seconds)
            self.say(f"step {reached['step']}: a new plan, predicted to take {predicted} a step:")
            self.say(watch.plan.describe(model.chain.names))
            replanned = engine_for(job, watch.plan, model, group)
            _check_smallest_batch(job, replanned, info)
            received = move(engine, replanned, model, group)
            moved = sum(group.gather_json(received))
            self.say(f"{human_bytes(moved)} of parameters and optimizer state changed hands")
            engine, resumed = replanned, reached
            data = load_for(job, engine, info)

    def _recorder(
        self,
        about: dict[str, Any],
        engine: Engine,
        watch: Watch | None,
        steps: int,
        resumed: dict[str, Any] | None,
        energy: EnergyMeter | None,
    ) -> Recorder:
        """Takes down what happens from now on, by this plan."""
        job, done = self._job, resumed["step"] if resumed else 0
        display = display_for(about["rank"], job.epochs, steps, done)
        about = {
            **about,
            "stage": engine.stage_number,
            "plan": engine.plan.to_json(),
            "forecast": watch.forecast.seconds if watch else None,
            "resumed_at": done,
        }
        file = job.run_folder / f"rank-{self._identity.rank}.jsonl"
        recorder = Recorder(file, display, about, job.telemetry.timeline_every, self._metrics, energy)
        self._metrics.started(about, job.epochs, steps, done)
        if resumed and done < steps:
            recorder.message(f"{'resumed' if 'shards' in resumed else 'on'} from step {done} of {steps}")
        return recorder


def _let_go(error: BaseException | None) -> None:
    """Drop what an error's frames hold: connections close with the last message under way, and the others wait."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
    gc.collect()


def _check_writable(folder: Path) -> None:
    """A folder that can never be written to is a mistake to tell at once; a full disk is not, it may get better."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise CheckpointError(
                f"cannot write records and checkpoints to {folder.absolute()} as user {os.getuid()}: "
                f"{error.strerror}; set `folder`, change that one's owner, or train with checkpoint.enabled=false"
            ) from error


def engine_for(job: Job, plan: Plan, model: Model, group: Group) -> Engine:
    """The engine that runs a plan."""
    kind: type[Engine] = Engine
    if job.parallel.strategy == "horovod" and job.parallel.stages is None and group.world_size > 1:
        from horizonml.engine.horovod import HorovodEngine

        kind = HorovodEngine
    compression = job.parallel.gradient_compression
    return kind(plan, model, group, job.optimizer, job.batch_size, job.label_smoothing, compression)


def load_for(job: Job, engine: Engine, info: DataInfo) -> Data:
    """The data for this rank: images for the first stage, labels for the last, nothing in between."""
    return load(job.data, info, cache_folder() / "data", images=engine.is_first, labels=engine.is_last)


def compatible_with(job: Job, info: DataInfo) -> dict[str, Any]:
    """What a checkpoint must agree with so that going on from it makes sense."""
    return {
        "model": job.model.model_dump(),
        "data": job.data.name,
        "samples": info.train,
        "seed": job.seed,
        "batch_size": job.batch_size,
        "optimizer": job.optimizer.name,
    }


def _check_smallest_batch(job: Job, engine: Engine, info: DataInfo) -> None:
    """BatchNorm cannot train on a single value per channel: say so now, not at the end of the first epoch."""
    for size in sorted({min(job.batch_size, info.train), info.train % job.batch_size} - {0}):
        for rank, problem in enumerate(engine.group.gather_json(engine.try_smallest(size))):
            if problem is not None:
                raise DataError(
                    f"batch_size: a batch of {size} samples (of {info.train}) leaves rank {rank} with one sample, on "
                    f"which this model cannot train ({problem}); change batch_size, data.samples, or "
                    "parallel.micro_batches"
                )


def _set_aside(folder: Path, group: Group, first_here: bool) -> None:
    """Make room for a fresh run; the one before is kept beside it, on every disk."""
    for turn in (group.rank == 0, group.rank != 0 and first_here):  # where disks are shared, rank 0 does it for all
        if turn and folder.exists():
            previous = folder.with_name(folder.name + ".previous")
            shutil.rmtree(previous, ignore_errors=True)
            folder.rename(previous)
        group.gather_json(None)
