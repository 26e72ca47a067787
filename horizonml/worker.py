"""The life of one rank: meet the others, agree on a plan, train, leave."""

from __future__ import annotations

import platform
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from horizonml import __version__
from horizonml.agreement import describe_together, make_plan
from horizonml.checkpoint import Checkpoints
from horizonml.cluster.device import available_cores, memory_limit, threads_per_rank
from horizonml.cluster.identity import Identity
from horizonml.cluster.rendezvous import Membership, meet
from horizonml.data.datasets import Data, DataInfo, load
from horizonml.engine.engine import Engine
from horizonml.engine.group import Group
from horizonml.engine.memory import keep_freed_memory
from horizonml.errors import DataError, PeerLost
from horizonml.files import cache_folder
from horizonml.job import Job
from horizonml.plan.simulate import Host
from horizonml.signals import stop_on_signal
from horizonml.telemetry.progress import display_for
from horizonml.telemetry.recorder import Recorder
from horizonml.telemetry.usage import rss_bytes
from horizonml.trainer import Outcome, train


def run(job: Job, identity: Identity, address: tuple[str, int] | None, fresh: bool) -> Outcome:
    """Train a job as one of its ranks. `address` is the rendezvous service's; None for a world of one.

    Raises HorizonError.
    """
    idle = rss_bytes()
    keep_freed_memory()
    say = _speaker(identity)
    membership = None
    if identity.world_size > 1:
        assert address is not None
        membership = meet(identity, job.name, job.digest(), address, job.rendezvous.timeout, say)
    reason = "done"
    try:
        return _in_group(job, identity, membership, fresh, idle, say)
    except PeerLost as error:
        reason = f"lost a peer: {error}"
        raise membership.name_lost(error) if membership else error from error
    except BaseException as error:
        reason = str(error) or type(error).__name__
        raise
    finally:
        if membership is not None:
            membership.leave(reason)


def _in_group(
    job: Job, identity: Identity, membership: Membership | None, fresh: bool, idle: int, say: Callable[[str], None]
) -> Outcome:
    store = membership.store if membership else None
    names = [member.host for member in membership.members] if membership else [socket.gethostname()]
    group = Group(store, identity.rank, identity.world_size, job.rendezvous.step_timeout, names)
    limits = group.gather_json([available_cores(), memory_limit()])
    hosts = [
        Host(
            tuple(rank for rank, other in enumerate(names) if other == name),
            float(limits[names.index(name)][0]),
            float(limits[names.index(name)][1]) / names.count(name),
        )
        for name in dict.fromkeys(names)
    ]
    here = next(host for host in hosts if identity.rank in host.ranks)
    torch.set_num_threads(threads_per_rank(here.cores, len(here.ranks)))
    if fresh and here.ranks[0] == identity.rank:
        _set_aside(job.run_folder)
    info, model = describe_together(job, group)
    plan = make_plan(job, model, info, group, hosts, say)
    engine = Engine(plan, model, group, job.optimizer, job.batch_size, job.label_smoothing)
    _check_smallest_batch(job, engine, info)
    data = load_for(job, engine, info)
    checkpoints = resumed = None
    if job.checkpoint.enabled:
        checkpoints = Checkpoints(
            job.run_folder / "checkpoints", group, names, job.checkpoint.keep, compatible_with(job, info)
        )
        resumed = checkpoints.resume(engine) if job.checkpoint.resume else None
    steps = job.epochs * -(-info.train // job.batch_size)
    done = resumed["step"] if resumed else 0
    display = display_for(identity.rank, job.epochs, steps, done)
    about = {
        "rank": identity.rank,
        "world_size": identity.world_size,
        "generation": membership.generation if membership else 0,
        "stage": engine.stage_number,
        "host": names[identity.rank],
        "job": job.model_dump(),
        "plan": plan.to_json(),
        "layers": model.chain.names,
        "resumed_at": done,
        "rss_idle_bytes": idle,
        "threads": torch.get_num_threads(),
        "cores": here.cores,
        "versions": {"horizonml": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    recorder = Recorder(job.run_folder / f"rank-{identity.rank}.jsonl", display, about, job.telemetry.timeline_every)
    if resumed and done < steps:
        recorder.message(f"resumed from step {done} of {steps}")
    outcome: str = "failed"
    try:
        with stop_on_signal() as stop:
            result = train(job, engine, data, checkpoints, recorder, resumed, stop)
        outcome = result
        return result
    finally:
        recorder.close(outcome)
        group.close()


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


def _set_aside(folder: Path) -> None:
    """Make room for a fresh run; the one before is kept beside it."""
    if folder.exists():
        previous = folder.with_name(folder.name + ".previous")
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)


def _speaker(identity: Identity) -> Callable[[str], None]:
    def say(text: str) -> None:
        if identity.rank == 0 or text.startswith("waiting"):
            prefix = f"rank {identity.rank}: " if identity.world_size > 1 and identity.rank else ""
            print(prefix + text, file=sys.stderr if identity.rank else sys.stdout, flush=True)

    return say
