"""Makes a job's plan, for this machine or for a cluster on paper, and shows why it is as it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
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
from horizonml.text import count, human_bytes, human_seconds

if TYPE_CHECKING:
    from horizonml.data.dataset import DataInfo
    from horizonml.models.zoo import Model
    from horizonml.planner.evaluator import Candidate
    from horizonml.planner.problem import Problem


def show_plan(
    job: Job, devices: Path | None, as_json: bool, out: Path | None, picture: Path | None, as_given: bool = False
) -> None:
    """Print a model's layers and the plan made of the job; write the plan, or a picture of it.

    With `devices`, for the cluster that the file describes: the job's explicit stages, else the best that is found, or
    the job's own strategy if `as_given`. Raises HorizonError, also for a plan that no device could carry out.
    """
    if picture is not None:
        require("matplotlib", "--picture")
        if picture.suffix.lower() != ".png":
            raise JobError(f"--picture: {picture} must end in .png, for pictures are PNG")
    from horizonml.machine.memory import keep_freed_memory
    from horizonml.planner.evaluator import judge
    from horizonml.planner.explain import remedy, shortage
    from horizonml.planner.planner import fixed_plan, needs_profile
    from horizonml.runtime.agreement import choose_or_say_why, describe_problem

    keep_freed_memory()
    if devices is not None:
        job, places = _on_paper(job, devices, as_given)
    else:
        places = _here(job)
    info, model, profiles = _profiled(job, places)
    problem = describe_problem(job, model, info, profiles, places.hosts, places.network)
    if needs_profile(job.parallel, problem.ranks):
        found = choose_or_say_why(job, model, problem)
    else:
        found = judge(problem, fixed_plan(job, len(model.chain), problem.ranks))
    plan = found.plan
    by_channels = any(stage.splits_channels for stage in plan.stages)
    # What a split by channels needs is not known.
    reason = None if by_channels else shortage(problem, found, places.names)
    if reason is not None:
        raise PlanError(f"the plan does not fit the devices: {reason}. {remedy(problem, found)}")
    if out is not None:
        write_plan(plan, out, places.names if devices is not None else ())
    if picture is not None:
        from horizonml.report.run_plots import predicted

        predicted(found.plan, found.prediction, places.names, picture)
    if as_json:
        content = {"plan": plan.to_json(), "seconds": found.prediction.seconds, "profile": profiles[0].to_json()}
        print(json.dumps(content, indent=2))
        return
    _print_layers(job, profiles[0])
    _print_plan(job, problem, found, places, model)


@dataclass(frozen=True)
class _Places:
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


def _here(job: Job) -> _Places:
    """Return this machine as the place of all of the job's ranks."""
    from horizonml.machine.resources import available_cores, memory_limit, threads_per_rank
    from horizonml.machine.usage import rss_bytes

    cores, world_size = available_cores(), job.parallel.world_size()
    host = Host(tuple(range(world_size)), cores, memory_limit() / world_size - rss_bytes())
    network = Network(1e-4, 1e9)  # ranks of one machine
    threads = job.parallel.threads or threads_per_rank(cores, world_size)
    return _Places([f"rank {rank}" for rank in range(world_size)], [host], network, threads)


def _on_paper(job: Job, devices: Path, as_given: bool) -> tuple[Job, _Places]:
    """Return the devices of a file, and the job for them: with the best plan, unless its own was asked for."""
    cluster = load_cluster(devices)
    changes: dict[str, object] = {"parallel.workers": len(cluster.names)}
    if job.parallel.stages is None and not as_given:
        changes["parallel.strategy"] = "auto"
        _say_what_is_not_used(job, changed(job, changes), devices)
    job = changed(job, changes)
    return job, _Places(cluster.names, cluster.hosts(), cluster.network(), 1, cluster, devices.parent)


def _profiled(job: Job, places: _Places) -> tuple[DataInfo, Model, Sequence[Profile]]:
    """Return the job's data and model, and the model's profile on each rank's device."""
    import torch

    from horizonml.comm.group import Group
    from horizonml.profiling.measure import cached_profile
    from horizonml.runtime.agreement import describe_together, profile_key

    torch.set_num_threads(places.threads)
    info, model = describe_together(job, Group(None, 0, 1, 60.0))

    def measured() -> Profile:
        return cached_profile(model, profile_key(job), job.batch_size, lambda text: print(text, file=sys.stderr))

    if places.cluster is None:
        return info, model, [measured()] * len(places.names)
    return info, model, places.cluster.profiles(measured, model.chain.names, places.folder)


def _say_what_is_not_used(given: Job, planned: Job, devices: Path) -> None:
    """Tell which of a job's fields differ from what is planned for."""
    fields = ("strategy", "workers")
    own, used = ({name: getattr(job.parallel, name) for name in fields} for job in (given, planned))
    unused = [f"parallel.{name}: {own[name]}" for name in fields if own[name] not in (None, used[name])]
    if unused:
        print(
            f"note: the best plan for the {count(planned.parallel.world_size(), 'device')} of {devices} is shown, "
            f"whatever the job says ({', '.join(unused)})",
            file=sys.stderr,
        )


def show_profile(job: Job, out: Path | None, threads: int | None) -> None:
    """Measure a model's layers here, print them, and write them as YAML. Raises HorizonError."""
    import torch

    from horizonml.comm.group import Group
    from horizonml.machine.host import versions
    from horizonml.machine.memory import keep_freed_memory
    from horizonml.machine.resources import available_cores, memory_limit, threads_per_rank
    from horizonml.profiling.measure import cached_profile
    from horizonml.runtime.agreement import describe_together, profile_key

    keep_freed_memory()
    torch.set_num_threads(threads or threads_per_rank(available_cores(), 1))
    _, model = describe_together(job, Group(None, 0, 1, 60.0))
    profile = cached_profile(model, profile_key(job), job.batch_size, lambda text: print(text, file=sys.stderr))
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


def _print_plan(job: Job, problem: Problem, found: Candidate, places: _Places, model: Model) -> None:
    from horizonml.planner.explain import bottleneck, compare, explain_parts, rows, why
    from horizonml.runtime.agreement import uncut_layer

    plan, layer_names, names = found.plan, model.chain.names, places.names
    print()
    if any(stage.splits_channels for stage in plan.stages):
        for line in plan.describe(layer_names).splitlines():
            print_text(line)
        print()
        print_text("no prediction: what layers send in their middle is not in the profile")
        return
    shown = [
        [row.stage, row.layers, row.rank, row.rows, row.sends, row.memory, row.busy]
        for row in rows(problem, found, names, layer_names)
    ]
    micro_batches = count(plan.micro_batches, "micro-batch")
    print_table(
        f"plan for {count(problem.ranks, 'rank')}{places.where}: {plan.schedule}, {micro_batches}",
        ["stage", "layers", "rank", "rows", "sends", "memory", "busy"],
        shown[:40],
        text=(1, 2, 4),
    )
    if len(shown) > 40:
        print_text(f"... and {count(len(shown) - 40, 'more rank')} (--out writes them all)")
    if model.note:
        print_text(model.note)
    seconds = found.prediction.seconds
    print()
    print_text(
        f"predicted: {human_seconds(seconds)} a step of {count(job.batch_size, 'sample')} "
        f"({job.batch_size / seconds:,.0f} samples/s)"
    )
    print_text(explain_parts(found), "  ")
    print_text(bottleneck(problem, found, names))
    whole = uncut_layer(model, problem)
    if whole is not None and len(plan.stages) > 1:
        print_text(f"{job.model.name}: {whole}.")
    if 1 < problem.ranks <= 200:
        for line in why(problem, found, names):
            print_text(line)
        print_text("This is")
        for line in compare(problem, found, names):
            print_text(line, "- ")
