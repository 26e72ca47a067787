"""Agrees among the ranks of a group, before they train, on the description of the data and on the plan.

Rank 0 measures and chooses the plan, and all ranks follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from horizonml.comm.expected import fields, instance, optional, plain, text
from horizonml.comm.group import Group
from horizonml.data.choose import agree, describe
from horizonml.data.dataset import DataInfo, loads_ahead, sample_bytes
from horizonml.data.spec import DataSpec
from horizonml.errors import HorizonError, ModelError, PeerLost, PlanError
from horizonml.job.schema import Job
from horizonml.machine.accelerator import computing
from horizonml.machine.sensors import EnergyMeter
from horizonml.models.download import locate
from horizonml.models.zoo import Model, build
from horizonml.plan.plan import PLAIN, Execution, Plan, Sync
from horizonml.planner.choose import choose
from horizonml.planner.devices import write_cluster
from horizonml.planner.evaluator import Candidate, Evaluator, judge
from horizonml.planner.explain import explain
from horizonml.planner.problem import Loading, Problem, Watts, check_watts
from horizonml.planner.profile import LOCAL_NETWORK, Contention, Host, Network, Profile
from horizonml.planner.reasons import Told, asked_for, drawback, inexact_layers, inexact_parts, shortage, uncut
from horizonml.planner.strategies import fixed_plan, measures_every_device, needs_profile, problem_for, syncs_of
from horizonml.profiling.execution import gain_here
from horizonml.profiling.measure import cached_profile, kept_profile
from horizonml.profiling.probe import (
    MOST_PROBED,
    ProcessCost,
    measure_contention,
    probe_network,
    probe_pairs,
    turns,
    with_contention,
)
from horizonml.profiling.watts import device_watts
from horizonml.runtime.checks import why_untried
from horizonml.runtime.stragglers import Decision, Forecast
from horizonml.state.spec import Sgd
from horizonml.tasks.choose import channels_for, task_for
from horizonml.text import human_seconds

_MOST_COMPARED = 64  # ranks whose plan is compared with simpler ones before they train


@dataclass(frozen=True)
class Measured:
    """Holds what the ranks measured: a profile for each, the links between them, and what else their machines tell."""

    profiles: Sequence[Profile]
    network: Network
    contention: Sequence[Contention]  # on each rank's machine
    watts: Sequence[Watts | None] = ()  # that each rank's device draws

    def among(self, ranks: Sequence[int]) -> Measured:
        """Return what is known of some of the ranks, which are numbered anew in this order."""
        watts = [self.watts[rank] for rank in ranks if self.watts]
        contention = [self.contention[rank] for rank in ranks]
        return Measured([self.profiles[rank] for rank in ranks], self.network.among(ranks), contention, watts)


@dataclass(frozen=True)
class Agreed(Decision):
    """Holds a plan, what was measured for it, its forecast if it is automatic, and on rank 0 what it was made for."""

    problem: Problem | None = None
    measured: Measured | None = None


def describe_together(job: Job, group: Group) -> tuple[DataInfo, Model]:
    """Return the data as all ranks see it, and the model for it. Raises DataError or ModelError."""
    info = describe_data(job, group)
    return info, model_for(job, info)


def prepare(job: Job) -> tuple[DataInfo, Model] | None:
    """Return the data and the model as far as this rank can tell by itself, so that no other rank waits for it later.

    Return None if there is anything wrong; the ranks find out together, so that each of them can say what it is.
    """
    with suppress(Exception):
        if job.model.weights is not None:
            locate(job.model.weights, job.model.name)  # downloads take longer than others wait for a message
        info = describe(job.data, channels_for(job))
        if info is not None:
            return info, model_for(job, info)
    return None


def model_for(job: Job, info: DataInfo) -> Model:
    """Return the job's model for data of this kind. Raises ModelError."""
    task = task_for(job, info)
    return build(job.model, job.seed, task.outputs(info), task.input(info))


def check_weights(digests: Sequence[str | None]) -> None:
    """Raise ModelError if the ranks have different pretrained weights; these are the digests of their files."""
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ModelError(
                f"model.weights: rank {rank} has another file than rank 0 (SHA-256 {str(digest)[:8]}..., not "
                f"{str(digests[0])[:8]}...); give all ranks the same"
            )


def describe_data(job: Job, group: Group) -> DataInfo:
    """Return the data as all ranks see it. Raises DataError on all of them."""

    def described() -> dict[str, object] | None:
        found = describe(job.data, channels_for(job))
        return found.to_json() if found is not None else None

    return agree(group.agree(described, optional(DataInfo.from_json)), job.data)


def make_plan(
    job: Job,
    model: Model,
    info: DataInfo,
    group: Group,
    hosts: Sequence[Host],
    names: Sequence[str],
    say: Callable[[str], None],
    measured: Measured | str | None = None,
    execution: Execution = PLAIN,
    *,
    is_measured: bool = False,
) -> Agreed:
    """Return the plan of a job, the same on all ranks. Raises PlanError on all of them.

    Nothing is measured if rank 0 has measurements of all ranks, `measured`, as `is_measured` says on all of them.
    `names[r]` is the name of rank r's machine, and `execution` says how layers run on this rank. Where every
    device is measured, the result is written to the run's folder as a file of devices.
    """
    if model.note and model.proven and group.rank == 0:
        say(f"{job.model.name}: {model.note}")
    if not needs_profile(job.parallel, group.world_size):
        plan = fixed_plan(job, len(model.chain), group.world_size)
        if group.rank == 0:
            _say_inexact(plan, execution, say)
            if len(hosts) == 1 and not computing().accelerates:
                _say_crowded(job, model, info, plan, hosts[0], execution, say)
        return Agreed(plan)
    if not is_measured:
        measured = _measure(job, model, group, hosts, say, execution)
    answer = problem = None
    if group.rank == 0:
        try:
            if not isinstance(measured, Measured):
                raise PlanError(str(measured))
            hosts = with_contention(hosts, measured.contention)
            problem = describe_problem(job, model, info, measured.profiles, hosts, measured.network, measured.watts)
            check_watts(problem.objective, problem.watts, [f"{name} (rank {rank})" for rank, name in enumerate(names)])
            answer = plain(_decide(job, model, problem, names, execution, say))
        except HorizonError as error:
            answer = str(error)
    decided: Decision | str = group.broadcast(answer, read=_decision_or_error)
    if isinstance(decided, str):
        raise PlanError(decided)
    return Agreed(decided.plan, decided.forecast, problem, measured if isinstance(measured, Measured) else None)


def _decision_or_error(value: Any) -> Decision | str:
    return text(value) if isinstance(value, str) else instance(Decision)(value)


def _measure(
    job: Job,
    model: Model,
    group: Group,
    hosts: Sequence[Host],
    say: Callable[[str], None],
    execution: Execution,
) -> Measured | str:
    """Return the measurements of links and devices, or why they cannot be made.

    One rank on every machine measures its device, or rank 0 measures for all. All ranks must call this.
    """
    every = measures_every_device(job.parallel)
    costs = [ProcessCost()] * group.world_size
    if every and group.world_size <= MOST_PROBED:
        network, costs = probe_pairs(group)
    else:
        network = probe_network(group)
    lead = next(host.ranks[0] for host in hosts if group.rank in host.ranks) if every else 0
    own = trouble = watts = None
    for turn in turns(hosts) if every else [[lead]]:  # so that containers of one machine do not slow each other down
        try:
            if group.rank == lead and lead in turn:
                profile = cached_profile(model, profile_key(job), job.batch_size, say, execution)
                own = replace(profile, gain=gain_here(job, model, group.world_size, execution)).to_json()
            if every and lead in turn:
                # The meter is the processor's: of an accelerator's work it sees next to nothing.
                measures = group.rank == lead and job.parallel.objective != "time" and not computing().accelerates
                sharing = max(_sharing(hosts, group.rank), group.hosts.count(group.hosts[group.rank]))
                found = device_watts(EnergyMeter(), sharing, measures)
                watts = found.to_json() if found is not None else None
        except HorizonError as error:
            trouble = f"rank {group.rank}: {error}" if own is not None or group.rank != lead else str(error)
        group.barrier()
    told = [own, trouble, watts]
    measured = group.gather_json(told, fields(optional(Profile.from_json), optional(text), optional(Watts.from_json)))
    for _, reason, _ in measured:
        if reason is not None:
            return str(reason)
    first = {rank: host.ranks[0] if every else 0 for host in hosts for rank in host.ranks}
    for rank in sorted(set(first.values())):
        if measured[rank][0] is None:
            raise PeerLost(f"rank {rank} did not send what it has measured")
    known = {rank: measured[rank][0] for rank in sorted(set(first.values()))}
    profiles = [
        replace(
            known[first[rank]],
            message_seconds=cost.message,
            # What an accelerator copies, its profile says.
            transfer_seconds_per_byte=cost.byte + known[first[rank]].transfer_seconds_per_byte,
            crossing_seconds_per_byte=cost.crossing,
            waiting_cores=cost.waiting,
        )
        for rank, cost in enumerate(costs)
    ]
    draw = [measured[rank][2] or measured[first[rank]][2] for rank in range(group.world_size)]
    return Measured(profiles, network, measure_contention(group, hosts, model, job.batch_size), draw)


def _sharing(hosts: Sequence[Host], rank: int) -> int:
    """Return how many ranks share the machine of a rank, in its container or in others."""
    own = next(host for host in hosts if rank in host.ranks)
    return sum(len(host.ranks) for host in hosts if host is own or (own.machine and host.machine == own.machine))


def _decide(
    job: Job,
    model: Model,
    problem: Problem,
    names: Sequence[str],
    execution: Execution,
    say: Callable[[str], None],
) -> Decision:
    """Choose the plan, and report what is worth knowing about it. Raises PlanError."""
    choice = choose_or_say_why(job, model, problem)
    taken = human_seconds(choice.prediction.seconds)
    whole = uncut_layer(model, problem)
    if whole is not None:
        say(f"warning: {job.model.name}: {whole}, with this plan {taken}")
    forecast = None
    if measures_every_device(job.parallel):
        _write_down(job, names, problem, say)
        kind = "fastest" if choice.fastest is None else "best"
        say(f"predicted to be {kind}, with {taken} a step:")
        say(choice.plan.describe(model.chain.names))
        for one in explain(Evaluator(problem), choice, names, Told.RUN):
            say(one.text)
        forecast = Forecast.of(choice)
    else:
        _say_inexact(choice.plan, execution, say)
    _say_drawback(problem, choice, [f"{name} (rank {rank})" for rank, name in enumerate(names)], say)
    if not choice.prediction.fits:
        reason = shortage(problem, choice, names)
        say(f"warning: no plan was found that fits into the ranks' memory; this one comes nearest: {reason}")
    return Decision(choice.plan, forecast)


def _say_crowded(
    job: Job,
    model: Model,
    info: DataInfo,
    plan: Plan,
    host: Host,
    execution: Execution,
    say: Callable[[str], None],
) -> None:
    """Report that one process would be faster than the plan, whose ranks share a machine, if that can be told.

    Ranks that outnumber the cores are too many, whatever a prediction says. Others are compared if the model was
    measured here before.
    """
    ranks = len(host.ranks)
    if ranks > max(1, host.cores):
        cores = f"{host.cores:.3g} core{'' if host.cores == 1 else 's'}"
        say(
            f"warning: {ranks} ranks share the {cores} of this machine, which one process would use by itself: it "
            "would most likely train faster (--workers 1, with parallel.strategy ddp or single)"
        )
        return
    profile = kept_profile(model, profile_key(job), job.batch_size, execution)
    if profile is not None and not any(stage.splits_channels for stage in plan.stages):
        problem = describe_problem(job, model, info, [profile] * ranks, [host], LOCAL_NETWORK)
        _say_drawback(problem, judge(problem, plan), [f"rank {rank}" for rank in range(ranks)], say)


def _say_drawback(problem: Problem, found: Candidate, names: Sequence[str], say: Callable[[str], None]) -> None:
    line = drawback(problem, found, names) if 1 < problem.ranks <= _MOST_COMPARED else None
    if line is not None:
        say(f"warning: this plan is predicted to be {line}")


def _say_inexact(plan: Plan, execution: Execution, say: Callable[[str], None]) -> None:
    for reason in asked_for([*inexact_parts(plan), *inexact_layers([execution])]):
        say(reason.text)


def choose_or_say_why(job: Job, model: Model, problem: Problem) -> Candidate:
    """Return the plan that is predicted to be fastest. Raises PlanError, which says what prevents cuts in the model."""
    try:
        return choose(job, problem)
    except PlanError as error:
        whole = uncut_layer(model, problem)
        raise PlanError(f"{error}. {whole[0].upper()}{whole[1:]}" if whole else str(error)) from None


def uncut_layer(model: Model, problem: Problem) -> str | None:
    """Return a sentence about a layer that takes most of the time and cannot be cut, and what ddp costs, or None."""
    return uncut(problem, model.chain.bond, model.chain.names)


def _write_down(job: Job, names: Sequence[str], problem: Problem, say: Callable[[str], None]) -> None:
    try:
        measured = problem.hosts, problem.network, problem.profiles, problem.watts
        path = write_cluster(job.run_folder, names, *measured)
    except OSError as error:
        say(f"warning: what was measured could not be written to {job.run_folder}: {error.strerror or error}")
    else:
        say(f"measured devices and links: {path}")


def profile_key(job: Job) -> dict[str, object]:
    """Return what a profile depends on, besides the device and the shapes of the layers."""
    return {"model": job.model.identity()}


def describe_problem(
    job: Job,
    model: Model,
    info: DataInfo,
    profiles: Sequence[Profile],
    hosts: Sequence[Host],
    network: Network,
    watts: Sequence[Watts | None] = (),
) -> Problem:
    """Return the planner's problem, with a profile for every rank."""
    synced = synced_bytes(model, syncs_of(job.parallel))
    last = info.train % job.batch_size
    loading = loading_for(job.data, info)
    steps = job.total_steps(-(-info.train // job.batch_size))
    problem = problem_for(job, profiles, hosts, network, optimizer_copies(job), last, synced, loading, watts, steps)
    why = why_untried(job, info)
    return problem if why is None else replace(problem, constraints=problem.constraints.without_trial(why))


def loading_for(spec: DataSpec, info: DataInfo) -> Loading:
    """Return what samples take that are loaded ahead of the step."""
    if not loads_ahead(spec):
        return Loading()
    return Loading(*sample_bytes(info), spec.prefetch, spec.memory)


def synced_bytes(model: Model, syncs: Collection[Sync]) -> dict[str, list[int]]:
    """Return what members sum of each layer's gradients, by the name of each sync for which that depends on shapes."""
    return {
        sync.name: [int(sync.bytes_of(shapes)) for shapes in model.parameter_shapes]
        for sync in syncs
        if sync.numbers is not None
    }


def optimizer_copies(job: Job) -> int:
    """Return how many numbers the optimizer keeps per parameter, moving averages included."""
    average = int(job.ema.decay is not None)
    if isinstance(job.optimizer, Sgd):
        return int(job.optimizer.momentum > 0) + average
    return 2 + average
