"""Makes a job's plan without ranks: for this machine, or for the devices of a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from horizonml.comm.group import Group
from horizonml.data.dataset import DataInfo
from horizonml.errors import PlanError
from horizonml.job.jobfile import changed
from horizonml.job.schema import Job
from horizonml.machine.accelerator import Compute, computing, use
from horizonml.machine.emulation import is_emulated
from horizonml.machine.host import available_cores, keep_freed_memory, memory_share, rss_bytes, threads_per_rank
from horizonml.machine.sensors import EnergyMeter
from horizonml.models.zoo import Model
from horizonml.planner.devices import Cluster, load_cluster
from horizonml.planner.evaluator import Candidate, Evaluator, judge
from horizonml.planner.explain import explain, run_reasons
from horizonml.planner.problem import Problem, Watts, check_watts
from horizonml.planner.profile import LOCAL_NETWORK, Host, Network, Profile
from horizonml.planner.reasons import Reason, Told, remedy, shortage
from horizonml.planner.strategies import fixed_plan, may_cut, needs_profile
from horizonml.planner.worth import Worth, predicted_worth
from horizonml.profiling.execution import execution_here, gain_here, untried
from horizonml.profiling.measure import cached_profile
from horizonml.profiling.watts import device_watts, stated_watts
from horizonml.runtime.agreement import choose_or_say_why, describe_problem, describe_together, profile_key
from horizonml.runtime.checks import LOCAL_STEPS, device_of, proven_cutting, why_untried
from horizonml.runtime.launch import for_this_machine
from horizonml.text import count

Say = Callable[[str], None]


@dataclass(frozen=True)
class Places:
    """Where a plan's ranks are: on this machine, or on the devices of a file."""

    names: Sequence[str]  # of the ranks
    hosts: Sequence[Host]
    network: Network
    threads: int
    cluster: Cluster | None = None  # of the file
    folder: Path = Path()  # of the file
    devices: Sequence[Compute] = ()  # of the ranks, on this machine

    @property
    def where(self) -> str:
        """What to add to a table's title."""
        return " on this machine" if self.cluster is None else ""


@dataclass(frozen=True)
class Planned:
    """Holds a job's plan with all that it was made of."""

    job: Job
    model: Model
    profiles: Sequence[Profile]
    problem: Problem
    found: Candidate
    places: Places
    untried: str | None  # why a run of the job cannot try what changes accuracy, if it cannot

    @property
    def predicted(self) -> bool:
        """Return whether there is a prediction: what a split by channels sends in its middle is not known."""
        return not any(stage.splits_channels for stage in self.found.plan.stages)

    @property
    def worth(self) -> Worth | None:
        """Return what the plan is predicted to be worth, against each device alone; None where that is not known."""
        if not self.predicted:
            return None
        return predicted_worth(self.problem, Evaluator(self.problem), self.found, self.places.names)

    def reasons(self, told: Told = Told.IN_FULL) -> list[Reason]:
        """Return what is `told` of the choices of a plan that is predicted, and what the run decides when it begins."""
        if not self.predicted:
            return []
        threads = self.places.threads if self.places.cluster is None else None
        untried = LOCAL_STEPS if self.found.plan.local is not None else self.untried
        left = [one for one in run_reasons(self.job, threads, untried) if one.told <= told]
        return [*explain(Evaluator(self.problem), self.found, self.places.names, told), *left]


def plan_job(job: Job, devices: Path | None, as_given: bool, say: Say, only: Collection[str] = ()) -> Planned:
    """Return the plan of a job: with `devices`, for the cluster that the file describes, or else for this machine.

    For devices that is the job's explicit stages, else the best plan that is found, or the job's own strategy if
    `as_given`. Of the file's devices, those that are named `only` count, unless none is. Raises HorizonError, also for
    a plan that no device could carry out.
    """
    keep_freed_memory()
    job, places = _on_paper(job, devices, as_given, say, only) if devices is not None else _on_this_machine(job, say)
    threads, device = torch.get_num_threads(), computing()
    try:
        info, model, profiles = _profiled(job, places, say)
    finally:
        torch.set_num_threads(threads)
        use(device)
    watts = places.cluster.watts() if places.cluster is not None else [_here_watts(job)] * len(places.names)
    problem = describe_problem(job, model, info, profiles, places.hosts, places.network, watts)
    check_watts(problem.objective, watts, places.names)
    if needs_profile(job.parallel, problem.ranks):
        found = choose_or_say_why(job, model, problem)
    else:
        found = judge(problem, fixed_plan(job, len(model.chain), problem.ranks))
    planned = Planned(job, model, profiles, problem, found, places, why_untried(job, info))
    reason = shortage(problem, found, places.names) if planned.predicted else None
    if reason is not None:
        raise PlanError(f"the plan does not fit the devices: {reason}. {remedy(problem, found)}")
    return planned


def _here_watts(job: Job) -> Watts | None:
    """Return what each of the job's ranks would draw on this machine, which is measured if the job asks for energy."""
    ranks = job.parallel.world_size()
    found = device_watts(EnergyMeter(), ranks, job.parallel.objective != "time")
    return (
        found if stated_watts() is not None or found is None else replace(found, busy=found.idle + found.added / ranks)
    )


def _on_this_machine(job: Job, say: Say) -> tuple[Job, Places]:
    """Return this machine as the place of all of the job's ranks. Raises JobError if it lacks the job's device."""
    job = for_this_machine(job, say)
    cores, world_size = available_cores(), job.parallel.world_size()
    devices = [device_of(job, rank) for rank in range(world_size)]
    for why in dict.fromkeys(device.why for device in devices if device.why):
        say(f"warning: {why}")
    own = memory_share(world_size) - rss_bytes()
    hosts = []
    for device in {one.label: one for one in devices}.values():  # an accelerator is a host, as in `find_hosts`
        ranks = tuple(rank for rank, other in enumerate(devices) if other.label == device.label)
        there = device.memory()
        if there is None:
            hosts.append(Host(ranks, cores, own, bursts=not is_emulated()))
            continue
        say(f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {device.described}")
        hosts.append(Host(ranks, 1.0, (min(own, there) if device.shared else there) / len(ranks)))
    threads = job.parallel.threads or threads_per_rank(cores, world_size)
    names = [f"rank {rank}" for rank in range(world_size)]
    return job, Places(names, hosts, LOCAL_NETWORK, threads, devices=devices)


def _on_paper(job: Job, devices: Path, as_given: bool, say: Say, only: Collection[str]) -> tuple[Job, Places]:
    """Return the devices of a file, and the job for them: with the best plan, unless its own was asked for."""
    cluster = load_cluster(devices)
    if set(only) & set(cluster.names):
        cluster = cluster.only(only)
    changes: dict[str, object] = {"parallel.workers": len(cluster.names)}
    if job.parallel.stages is None and not as_given:
        changes["parallel.strategy"] = "auto"
        _say_what_is_not_used(job, changed(job, changes), devices, say)
    job = changed(job, changes)
    return job, Places(cluster.names, cluster.hosts(), cluster.network(), 1, cluster, devices.parent)


def _profiled(job: Job, places: Places, say: Say) -> tuple[DataInfo, Model, Sequence[Profile]]:
    """Return the job's data and model, and the model's profile on each rank's device."""
    torch.set_num_threads(places.threads)
    info, model = describe_together(job, Group(None, 0, 1, 60.0))
    if may_cut(job.parallel, len(places.names)):
        model = model.recut(proven_cutting(job, model, info, say))

    def measured() -> Profile:
        steps = job.total_steps(-(-info.train // job.batch_size))
        execution = untried(job, execution_here(job, model, job.parallel.world_size(), steps, say))
        found = cached_profile(model, profile_key(job), job.batch_size, say, execution)
        return replace(found, gain=gain_here(job, model, job.parallel.world_size(), execution))

    if places.cluster is None:
        found = {}
        for label, device in {one.label: one for one in places.devices}.items():
            use(device)
            found[label] = measured()
        return info, model, [found[device.label] for device in places.devices]
    return info, model, places.cluster.profiles(measured, model.chain.names, places.folder)


def _say_what_is_not_used(given: Job, planned: Job, devices: Path, say: Say) -> None:
    fields = ("strategy", "workers")
    own, used = ({name: getattr(job.parallel, name) for name in fields} for job in (given, planned))
    unused = [f"parallel.{name}: {own[name]}" for name in fields if own[name] not in (None, used[name])]
    if unused:
        say(
            f"note: the best plan for the {count(planned.parallel.world_size(), 'device')} of {devices} is shown, "
            f"whatever the job says ({', '.join(unused)})"
        )
