"""Makes a job's plan without ranks: for this machine, or for the devices of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from horizonml.comm.group import Group
from horizonml.data.dataset import DataInfo
from horizonml.errors import PlanError
from horizonml.job.jobfile import changed
from horizonml.job.schema import Job
from horizonml.machine.memory import keep_freed_memory
from horizonml.machine.resources import available_cores, memory_share, threads_per_rank
from horizonml.machine.usage import rss_bytes
from horizonml.models.zoo import Model
from horizonml.planner.devices import Cluster, load_cluster
from horizonml.planner.evaluator import Candidate, judge
from horizonml.planner.explain import remedy, shortage
from horizonml.planner.hardware import LOCAL_NETWORK, Host, Network
from horizonml.planner.planner import fixed_plan, needs_profile
from horizonml.planner.problem import Problem
from horizonml.planner.profile import Profile
from horizonml.profiling.measure import cached_profile
from horizonml.runtime.agreement import choose_or_say_why, describe_problem, describe_together, profile_key
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

    @property
    def predicted(self) -> bool:
        """Return whether there is a prediction: what a split by channels sends in its middle is not known."""
        return not any(stage.splits_channels for stage in self.found.plan.stages)


def plan_job(job: Job, devices: Path | None, as_given: bool, say: Say) -> Planned:
    """Return the plan of a job: with `devices`, for the cluster that the file describes, or else for this machine.

    For devices that is the job's explicit stages, else the best plan that is found, or the job's own strategy if
    `as_given`. Raises HorizonError, also for a plan that no device could carry out.
    """
    keep_freed_memory()
    job, places = _on_paper(job, devices, as_given, say) if devices is not None else (job, _here(job))
    threads = torch.get_num_threads()
    try:
        info, model, profiles = _profiled(job, places, say)
    finally:
        torch.set_num_threads(threads)
    problem = describe_problem(job, model, info, profiles, places.hosts, places.network)
    if needs_profile(job.parallel, problem.ranks):
        found = choose_or_say_why(job, model, problem)
    else:
        found = judge(problem, fixed_plan(job, len(model.chain), problem.ranks))
    planned = Planned(job, model, profiles, problem, found, places)
    reason = shortage(problem, found, places.names) if planned.predicted else None
    if reason is not None:
        raise PlanError(f"the plan does not fit the devices: {reason}. {remedy(problem, found)}")
    return planned


def _here(job: Job) -> Places:
    """Return this machine as the place of all of the job's ranks."""
    cores, world_size = available_cores(), job.parallel.world_size()
    host = Host(tuple(range(world_size)), cores, memory_share(world_size) - rss_bytes())
    threads = job.parallel.threads or threads_per_rank(cores, world_size)
    return Places([f"rank {rank}" for rank in range(world_size)], [host], LOCAL_NETWORK, threads)


def _on_paper(job: Job, devices: Path, as_given: bool, say: Say) -> tuple[Job, Places]:
    """Return the devices of a file, and the job for them: with the best plan, unless its own was asked for."""
    cluster = load_cluster(devices)
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

    def measured() -> Profile:
        return cached_profile(model, profile_key(job), job.batch_size, say)

    if places.cluster is None:
        return info, model, [measured()] * len(places.names)
    return info, model, places.cluster.profiles(measured, model.chain.names, places.folder)


def _say_what_is_not_used(given: Job, planned: Job, devices: Path, say: Say) -> None:
    """Tell which of a job's fields differ from what is planned for."""
    fields = ("strategy", "workers")
    own, used = ({name: getattr(job.parallel, name) for name in fields} for job in (given, planned))
    unused = [f"parallel.{name}: {own[name]}" for name in fields if own[name] not in (None, used[name])]
    if unused:
        say(
            f"note: the best plan for the {count(planned.parallel.world_size(), 'device')} of {devices} is shown, "
            f"whatever the job says ({', '.join(unused)})"
        )
