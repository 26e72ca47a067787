"""Runs what the commands start: one rank, or all ranks of a job on this machine."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import yaml

from horizonml.errors import JobError
from horizonml.files import scratch_folder
from horizonml.job.jobfile import changed
from horizonml.job.schema import Job
from horizonml.machine.code import python_module
from horizonml.machine.host import check_device, memory_limit, process_memory, requested_device
from horizonml.machine.network import METRICS, service_address
from horizonml.machine.signals import Cancelled, handling, leave_at_once, stop_on_signal
from horizonml.plan.plan import facts_of
from horizonml.plan.spec import MOST_WORKERS
from horizonml.planner.strategies import syncs_of
from horizonml.rendezvous.identity import ASKED, Identity, local_rank
from horizonml.runtime.command import RENDEZVOUS, STOP_SECONDS, endpoint_for
from horizonml.runtime.local import TOGETHER, LocalRun
from horizonml.runtime.outcome import Outcome
from horizonml.state.runfolder import foreign, make_run_folder
from horizonml.telemetry.kubernetes import Release
from horizonml.telemetry.record import Observer
from horizonml.telemetry.sinks import check_packages
from horizonml.text import count, human_bytes

if TYPE_CHECKING:
    from horizonml.rendezvous.places import Lobby

_REPLACED_SECONDS = 30.0  # for the end of a pod whose job was replaced, which never comes if that is undone


def train_as_rank(
    job: Job,
    identity: Identity | str,
    fresh: bool,
    metrics: tuple[str, int] | None,
    stay: bool,
    observer: Observer | None = None,
    lobby: Lobby | None = None,
) -> Outcome:
    """Run one rank of a job, and return how its training ended. Raises HorizonError.

    Instead of an identity, the host:port of the rendezvous service makes this process a further rank of the run that
    meets there, with a number that the service gives.

    `metrics` is the host and the port at which to serve its metrics. With `stay`, the rank goes on serving them until
    SIGTERM once the job is done. The `observer` receives the records of steps and evaluations, on rank 0. The `lobby`
    lets new devices come to a run of `horizonml up` when its own service is gone.
    """
    sys.stdout = PatientStream(sys.stdout)
    check_strategy(job)
    endpoint = None
    elastic = isinstance(identity, Identity) and identity.world_size == ASKED
    if isinstance(identity, str):
        endpoint = endpoint_for(_split_address(identity, "--join"))
    elif elastic:
        endpoint = endpoint_for(_rendezvous_address(job))
    else:
        _check_world_size(job, identity)
        grows = (job.parallel.max_workers or 1) > 1 and (job.rendezvous.address or RENDEZVOUS in os.environ)
        if identity.world_size > 1 or grows:
            endpoint = endpoint_for(_rendezvous_address(job))
    with stop_on_signal() as stop:
        with handling(leave_at_once):  # loading PyTorch takes seconds
            from horizonml.rendezvous.meeting import ask_rank
            from horizonml.runtime.worker import Worker, settings_for
            from horizonml.telemetry.http import MetricsServer
            from horizonml.telemetry.metrics import Metrics

        settings = settings_for(job, elastic)
        if isinstance(identity, str) or elastic:
            assert endpoint is not None
            own = None if isinstance(identity, str) or identity.rank == ASKED else identity.rank
            try:
                world_size = job.parallel.world_size()
                identity = ask_rank(settings, world_size, endpoint, _Sayer(), lambda: stop.wanted, own)
            except Cancelled:
                print(_farewell(job, Outcome.STOPPED_WAITING, None), flush=True)
                return Outcome.STOPPED_WAITING
            if own is None:
                print(f"rank {identity.rank}: this is the number that the rendezvous service has given", flush=True)
            _check_world_size(job, identity)
            if identity.rank >= (most := max(identity.world_size, settings.max_world_size)):
                raise JobError(
                    f"rank {identity.rank} is one too many: the job takes at most {count(most, 'rank')} "
                    "(parallel.max_workers, or what parallel.stages names); change that, or scale the job back"
                )
        metered, server = Metrics(identity.rank), None
        if metrics is not None:
            host, port = metrics
            server = MetricsServer(metered.registry, (host, port + local_rank(os.environ)), lambda: metered.unready)
        # The launcher ends all ranks when one is lost; elsewhere something will restart the lost rank.
        worker = Worker(job, identity, endpoint, metered, stop, observer, settings, lobby)
        outcome = worker.run(fresh, rejoin=TOGETHER not in os.environ)
        prefix = f"rank {identity.rank}: " if identity.rank else ""
        print(prefix + _farewell(job, outcome, worker.newest_checkpoint, worker.step), flush=True)
        if outcome in (Outcome.COMPLETE, Outcome.ALREADY_COMPLETE, Outcome.COMPLETE_WITHOUT):
            metered.completed()
            if stay and not stop.wanted:
                print(f"rank {identity.rank} stays, to be watched; SIGTERM ends it", flush=True)
                release = Release()
                while not stop.wanted:
                    release.look()
                    time.sleep(0.2)
            elif server is not None:  # or the end would look like a crash
                server.last_look(lambda: stop.wanted)
        elif stop.is_replaced and stay:  # or Kubernetes would start it again, with the files that were replaced
            print(f"rank {identity.rank} waits until its pod is replaced, too", flush=True)
            deadline = time.monotonic() + _REPLACED_SECONDS
            while stop.number is None:
                if time.monotonic() > deadline:
                    print(f"rank {identity.rank} begins anew, as its pod is still there", flush=True)
                    command = python_module("horizonml", *sys.argv[1:])
                    os.execv(command[0], command)  # noqa: S606
                time.sleep(0.2)
        return outcome


class _Sayer:
    """Tells the user what a process waits for that has no rank yet."""

    def say_waiting(self, text: str) -> None:
        """Tell the user."""
        print(text, file=sys.stderr, flush=True)

    def waiting(self, ranks: Sequence[int], first: bool) -> None:
        """Take no note: nobody watches a process that has no rank."""


class PatientStream:
    """Wraps a stream, and goes on silently once nobody reads it any more, as after `horizonml train ... | head`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text unless the reader is gone."""
        with suppress(BrokenPipeError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream unless the reader is gone."""
        with suppress(BrokenPipeError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def check_strategy(job: Job) -> None:
    """Raise JobError if the job needs a package that is not installed."""
    for sync in syncs_of(job.parallel):
        if sync.package and not find_spec(sync.package):
            raise JobError(
                f"parallel.strategy: {sync.strategy or sync.name} needs {sync.package.capitalize()}, which is not "
                f"installed; {sync.install}"
            )


def check_memory(ranks: int, limit: float, each: int) -> None:
    """Raise JobError if so many ranks, which take at least `each` bytes, cannot run within `limit` bytes."""
    if ranks * each > limit:
        raise JobError(
            f"parallel.workers: {count(ranks, 'rank')} on this machine need at least {human_bytes(ranks * each)} of "
            f"memory, because each of these processes loads PyTorch, and there are {human_bytes(limit)}; use at most "
            f"{int(limit // each)}"
        )


def _check_device(job: Job) -> None:
    requested, source = requested_device(job.device)
    check_device(requested, source)
    if requested not in ("auto", "cpu"):  # or PyTorch need not be loaded
        from horizonml.machine.accelerator import check_there

        check_there(requested, source)


def _check_world_size(job: Job, identity: Identity) -> None:
    parallel, size = job.parallel, identity.world_size
    if parallel.stages is not None or parallel.workers is not None:
        wanted = parallel.world_size()
        if wanted != size:
            raise JobError(
                f"the job is for {count(wanted, 'rank')}, but {identity.source} says that the world size is "
                f"{size}; change parallel.workers (or parallel.stages), or start {count(wanted, 'rank')}"
            )
    for name, bound, wrong in (
        ("min_workers", parallel.min_workers, size < (parallel.min_workers or 0)),
        ("max_workers", parallel.max_workers, size > (parallel.max_workers or size)),
    ):
        if wrong:
            raise JobError(
                f"parallel.{name}: {bound}, but {identity.source} says that the world size is {size}; "
                "change one of them"
            )
    most = facts_of(job.parallel.strategy).max_workers if job.parallel.stages is None else None
    if most is not None and identity.world_size > most:
        raise JobError(
            f"parallel.strategy: {job.parallel.strategy} trains on {count(most, 'rank')}, but {identity.source} says "
            f"that the world size is {identity.world_size}; choose ddp, pipeline, hybrid or tensor"
        )


def _rendezvous_address(job: Job) -> tuple[str, int]:
    text = job.rendezvous.address or os.environ.get(RENDEZVOUS)
    if text is None:
        raise JobError(
            f"rendezvous.address: not set, and neither is ${RENDEZVOUS}; put `horizonml rendezvous --` before the "
            "command that starts the ranks, or start `horizonml rendezvous` on a machine that all ranks reach, and "
            "give its host:port"
        )
    return _split_address(text, RENDEZVOUS)


def _split_address(text: str, name: str) -> tuple[str, int]:
    try:
        return service_address(text)
    except ValueError:
        raise JobError(f"{name}: {text!r} is not host:port, for example 192.168.1.10:29400") from None


def _farewell(job: Job, outcome: Outcome, step: int | None, trained: int = 0) -> str:
    """Return the last message of a run with the steps of its newest checkpoint, if there is one, and of its state."""
    if outcome is Outcome.ALREADY_COMPLETE:
        length = "epochs" if job.steps is None else "steps"
        return (
            f"{job.run_folder} is trained to the end already; --fresh starts over, and --set {length}=N goes on (in "
            f"Python: fresh=True, {length}=N)"
        )
    if outcome is Outcome.COMPLETE_WITHOUT:
        return (
            "the job is complete: the other ranks have trained it to the end, and their disks have its checkpoints; "
            "nothing is left to do here"
        )
    if outcome is Outcome.STOPPED:
        if step is None:
            return "stopped as asked: nothing was saved"
        if step < trained:
            return (
                f"stopped as asked, after step {trained}: the newest checkpoint is that of step {step}, from which the "
                "same command or call continues"
            )
        return f"stopped as asked: a checkpoint is saved (step {step}); the same command or call continues from it"
    if outcome is Outcome.STOPPED_WAITING:
        return "stopped as asked, while waiting for the other ranks"
    if step is None:
        return f"done: records are in {job.run_folder}; nothing was saved, because checkpoint.enabled is false"
    return f"done: records and checkpoints are in {job.run_folder} (the newest checkpoint is that of step {step})"


def for_this_machine(job: Job, say: Callable[[str], None]) -> Job:
    """Return the job with a number of ranks for this machine, if neither it nor its strategy asks for several.

    A process computes with all cores, which several processes would only share: so it is one, or one for each
    accelerator. `say` is told which.
    """
    parallel = job.parallel
    if parallel.stages is not None or parallel.workers is not None or parallel.strategy not in ("ddp", "auto"):
        return job
    ranks = min(max(1, _cuda_devices(job), parallel.min_workers or 1), parallel.max_workers or MOST_WORKERS)
    if ranks == 1:
        say("training with 1 rank, which uses all cores of this machine by itself; --workers N starts several")
    return changed(job, {"parallel.workers": ranks})


def _cuda_devices(job: Job) -> int:
    requested, _ = requested_device(job.device)
    if requested not in ("auto", "cuda") or not Path("/dev/nvidiactl").exists():  # or PyTorch need not be loaded
        return 0
    from horizonml.machine.accelerator import cuda_devices

    return cuda_devices()


def train_here(job: Job, fresh: bool, metrics: tuple[str, int] | None = None) -> bool:
    """Run all ranks of a job on this machine, and return whether they finished without being interrupted.

    `metrics` is the host and the port at which rank 0 serves its metrics; the other ranks use the ports after it.
    Raises RankFailed or JobError.
    """
    with scratch_folder() as scratch:
        resolved = scratch / "job.yaml"
        resolved.write_text(yaml.safe_dump(job.model_dump(exclude_none=True)))
        command = python_module("horizonml", "train", str(resolved))
        if fresh:
            command.append("--fresh")
        env = {METRICS: f"{metrics[0]}:{metrics[1]}"} if metrics is not None else {}
        return run_ranks(job, command, fresh, env) is None


def run_ranks(
    job: Job,
    command: list[str],
    fresh: bool,
    env: Mapping[str, str],
    *,
    output: int | None = None,
    inherited: Sequence[int] = (),
    say: Callable[[str], None] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> int | None:
    """Run a command as each rank of a job on this machine, and return the signal that interrupted them, if any did.

    `output` and `inherited` are those of `LocalRun`, and `meanwhile` that of its `wait`; `say` shows a message, by
    default on standard output. Raises RankFailed or JobError.
    """
    check_strategy(job)
    check_packages(job.telemetry)
    _check_device(job)
    world_size = job.parallel.world_size()
    check_memory(world_size, memory_limit(), process_memory())
    problem = foreign(job.run_folder) if fresh else None
    if problem is not None:
        raise JobError(problem)
    with scratch_folder() as scratch:
        (say or _say)(f"starting {count(world_size, 'rank')} on this machine ...")
        logs = _log_folder(job, scratch)
        patience = STOP_SECONDS
        if job.parallel.may_take_local_steps:  # which end at a synchronisation
            patience = max(patience, job.rendezvous.step_timeout)
        kept = logs != scratch
        with LocalRun(world_size, command, logs, env, kept, output, inherited, patience) as run:
            run.wait(meanwhile)
            return run.signal


def _say(text: str) -> None:
    print(text, flush=True)


def _log_folder(job: Job, otherwise: Path) -> Path:
    try:
        make_run_folder(job.run_folder)
        with tempfile.TemporaryFile(dir=job.run_folder):
            return job.run_folder
    except OSError:
        return otherwise
