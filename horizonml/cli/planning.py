"""Makes plans for the command line, on this machine or for a cluster on paper, and prints them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from horizonml.cli.tables import print_table, print_text
from horizonml.errors import JobError, PlanError
from horizonml.files import writing
from horizonml.job.jobfile import changed
from horizonml.job.planfile import write_plan
from horizonml.job.schema import Job
from horizonml.machine.extras import require
from horizonml.planner.devices import Cluster, load_cluster, write_profile
from horizonml.planner.hardware import Host, Network
from horizonml.planner.profile import Profile
from horizonml.planner.search import Found, Problem
from horizonml.text import count, human_bytes, human_seconds

if TYPE_CHECKING:
    from horizonml.data.datasets import DataInfo
    from horizonml.models.zoo import Model

_LOCAL_NETWORK = Network(1e-4, 1e9)  # between ranks of one machine
_MOST_ROWS = 40  # of the table of ranks
_MOST_EXPLAINED = 200  # ranks for which simpler plans are compared


@dataclass(frozen=True)
class Planned:
    """A plan for a job, and what it was made for."""

    job: Job
    model: Model
    problem: Problem
    found: Found
    names: list[str]  # of the ranks' devices
    on_paper: bool  # whether the devices come from a file


def show_plan(
    job: Job, devices: Path | None, as_json: bool, out: Path | None, picture: Path | None, as_given: bool = False
) -> None:
    """Print a model's layers and the plan made of the job; write the plan, or a picture of it.

    With `devices`, plan for the cluster that the file describes: by the job's explicit stages, else as is best, or by
    the job's own strategy if `as_given`. Raises HorizonError, also for a plan that no device could carry out.
    """
    if picture is not None:
        require("matplotlib", "--picture")
        if picture.suffix.lower() != ".png":
            raise JobError(f"--picture: {picture} must end in .png, for pictures are PNG")
    planned = _plan_here(job) if devices is None else _plan_on_paper(job, devices, as_given)
    _check_memory(planned)
    found, profile = planned.found, planned.problem.profiles[0]
    if out is not None:
        parallel = planned.job.parallel
        kind = parallel.strategy if parallel.stages is None else None
        write_plan(found.plan, out, kind, planned.names if planned.on_paper else ())
    if picture is not None:
        from horizonml.report.run_plots import predicted

        predicted(found.plan, found.prediction, planned.names, picture)
    if as_json:
        content = {"plan": found.plan.to_json(), "seconds": found.prediction.seconds, "profile": profile.to_json()}
        print(json.dumps(content, indent=2))
        return
    _print_layers(planned.job, profile)
    _print_plan(planned)


def _plan_here(job: Job) -> Planned:
    """Make the plan for ranks that share this machine. Raises HorizonError."""
    from horizonml.machine.memory import keep_freed_memory
    from horizonml.machine.resources import available_cores, memory_limit, threads_per_rank
    from horizonml.machine.usage import rss_bytes

    keep_freed_memory()
    ranks, cores = job.parallel.world_size(), available_cores()
    info, model = _describe(job, job.parallel.threads or threads_per_rank(cores, ranks))
    hosts = [Host(tuple(range(ranks)), cores, memory_limit() / ranks - rss_bytes())]
    profiles = [_measure(job, model, info)] * ranks
    names = [f"rank {rank}" for rank in range(ranks)]
    return _choose(job, model, info, Devices(names, hosts, _LOCAL_NETWORK, profiles))


def _plan_on_paper(job: Job, path: Path, as_given: bool) -> Planned:
    """Make the plan for the devices that a file describes. Raises HorizonError."""
    from horizonml.machine.memory import keep_freed_memory

    keep_freed_memory()
    cluster: Cluster = load_cluster(path)
    changes: dict[str, object] = {"parallel.workers": len(cluster.names)}
    if job.parallel.stages is None and not as_given:
        changes["parallel.strategy"] = "auto"
        _say_what_is_not_used(job, path, len(cluster.names))
    job = changed(job, changes)
    info, model = _describe(job, threads=1)
    profiles = cluster.profiles(lambda: _measure(job, model, info), model.chain.names, path.parent)
    devices = Devices(cluster.names, cluster.hosts(), cluster.network(), profiles)
    return _choose(job, model, info, devices, on_paper=True)


@dataclass(frozen=True)
class Devices:
    """What a plan is made for: a name and a profile for every rank, and the hosts and the network between them."""

    names: list[str]
    hosts: list[Host]
    network: Network
    profiles: list[Profile]


def _describe(job: Job, threads: int) -> tuple[DataInfo, Model]:
    """Return what the data and the model are like, with as many threads from here on. Raises HorizonError."""
    import torch

    from horizonml.engine.group import Group
    from horizonml.runtime.agreement import describe_together

    torch.set_num_threads(threads)
    return describe_together(job, Group(None, 0, 1, 60.0))


def _measure(job: Job, model: Model, info: DataInfo) -> Profile:
    """Return the profile of the model on this device, and say so if that takes time."""
    from horizonml.profiling.measure import cached_profile
    from horizonml.runtime.agreement import profile_key

    return cached_profile(model, profile_key(job, info), job.batch_size, lambda text: print(text, file=sys.stderr))


def _choose(job: Job, model: Model, info: DataInfo, devices: Devices, on_paper: bool = False) -> Planned:
    """Return the plan for some devices. Raises PlanError."""
    from horizonml.planner.planner import fixed_plan, needs_profile
    from horizonml.runtime.agreement import choose_or_say_why, describe_problem

    ranks = len(devices.names)
    problem = describe_problem(job, model, info, devices.profiles, devices.hosts, devices.network)
    if needs_profile(job.parallel, ranks):
        found = choose_or_say_why(job, model, problem)
    else:
        found = problem.judge(fixed_plan(job, len(model.chain), ranks))
    return Planned(job, model, problem, found, devices.names, on_paper)


def _check_memory(planned: Planned) -> None:
    """Raise PlanError if the plan needs more memory than a device has."""
    from horizonml.planner.explain import remedy, shortage

    if any(stage.splits_channels for stage in planned.found.plan.stages):
        return  # what a split by channels needs is not known
    reason = shortage(planned.problem, planned.found, planned.names)
    if reason is not None:
        raise PlanError(f"the plan does not fit the devices: {reason}. {remedy(planned.problem, planned.found)}")


def _say_what_is_not_used(job: Job, devices: Path, ranks: int) -> None:
    """Tell the user which fields of the job the plan ignores, if any."""
    unused = [] if job.parallel.strategy == "auto" else [f"parallel.strategy: {job.parallel.strategy}"]
    if job.parallel.workers not in (None, ranks):
        unused.append(f"parallel.workers: {job.parallel.workers}")
    if unused:
        print(
            f"note: the best plan for the {count(ranks, 'device')} of {devices} is shown, whatever the job says "
            f"({', '.join(unused)})",
            file=sys.stderr,
        )


def show_profile(job: Job, out: Path | None, threads: int | None) -> None:
    """Measure a model's layers here, print them, and write them as YAML. Raises HorizonError."""
    import torch

    from horizonml.machine.host import versions
    from horizonml.machine.memory import keep_freed_memory
    from horizonml.machine.resources import available_cores, memory_limit, threads_per_rank

    keep_freed_memory()
    info, model = _describe(job, threads or threads_per_rank(available_cores(), 1))
    profile = _measure(job, model, info)
    _print_layers(job, profile)
    if out is not None:
        about = {
            "model": job.model.name,
            "threads": torch.get_num_threads(),
            "cores": available_cores(),
            "memory_limit": int(memory_limit()),
            "versions": versions(),
        }
        with writing(out):
            write_profile(profile, about, out)


def _print_layers(job: Job, profile: Profile) -> None:
    rows = [
        [
            str(number),
            layer.name,
            human_seconds(layer.forward[-1]),
            human_seconds(layer.backward[-1]),
            human_bytes(layer.parameter_bytes),
            human_bytes(layer.output_bytes),
        ]
        for number, layer in enumerate(profile.layers)
    ]
    samples = count(profile.sizes[-1], "sample")
    print_table(
        f"{job.model.name} on {profile.device}, forward and backward for {samples}:",
        ["layer", "name", "forward", "backward", "parameters", "output/sample"],
        rows,
        text=(1,),
    )


def _print_plan(planned: Planned) -> None:
    from horizonml.planner.explain import rows

    plan, problem, layer_names = planned.found.plan, planned.problem, planned.model.chain.names
    print()
    if any(stage.splits_channels for stage in plan.stages):
        for line in plan.describe(layer_names).splitlines():
            print_text(line)
        print()
        print_text("no prediction: what layers send in their middle is not in the profile")
        return
    where = "" if planned.on_paper else " on this machine"
    shown = [
        [row.stage, row.layers, row.rank, row.rows, row.sends, row.memory, row.busy]
        for row in rows(problem, planned.found, planned.names, layer_names)
    ]
    micro_batches = count(plan.micro_batches, "micro-batch")
    print_table(
        f"plan for {count(problem.ranks, 'rank')}{where}: {plan.schedule}, {micro_batches}",
        ["stage", "layers", "rank", "rows", "sends", "memory", "busy"],
        shown[:_MOST_ROWS],
        text=(1, 2, 4),
    )
    if len(shown) > _MOST_ROWS:
        print_text(f"... and {count(len(shown) - _MOST_ROWS, 'more rank')} (--out writes them all)")
    print()
    _print_prediction(planned)


def _print_prediction(planned: Planned) -> None:
    """Print what a plan is predicted to take, what limits it, and how simpler plans compare."""
    from horizonml.planner.explain import bottleneck, compare, explain_parts, why
    from horizonml.runtime.agreement import uncut_layer

    job, problem, found, names = planned.job, planned.problem, planned.found, planned.names
    seconds = found.prediction.seconds
    print_text(
        f"predicted: {human_seconds(seconds)} a step of {count(job.batch_size, 'sample')} "
        f"({job.batch_size / seconds:,.0f} samples/s)"
    )
    print_text(explain_parts(found), "  ")
    print_text(bottleneck(problem, found, names))
    whole = uncut_layer(planned.model, problem)
    if whole is not None and len(found.plan.stages) > 1:
        print_text(f"{job.model.name}: {whole}.")
    if 1 < problem.ranks <= _MOST_EXPLAINED:
        for line in why(problem, found, names):
            print_text(line)
        print_text("This is")
        for line in compare(problem, found, names):
            print_text(line, "- ")
