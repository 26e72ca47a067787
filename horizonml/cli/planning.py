"""`horizonml plan`: the plan for a job, on this machine or on a cluster on paper, and why it is as it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from horizonml.cli.tables import print_table, print_text
from horizonml.errors import JobError, PlanError
from horizonml.files import write_atomically, writing
from horizonml.job.jobfile import changed
from horizonml.job.reading import read_yaml
from horizonml.job.schema import Job
from horizonml.machine.extras import require
from horizonml.plan.plan import Plan
from horizonml.planner.devices import load_cluster, write_profile
from horizonml.planner.hardware import Host, Network
from horizonml.planner.profile import Profile
from horizonml.planner.search import Found, Problem
from horizonml.text import count, human_bytes, human_seconds

if TYPE_CHECKING:
    from horizonml.models.zoo import Model


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
    import torch

    from horizonml.comm.group import Group
    from horizonml.machine.device import available_cores, memory_limit, threads_per_rank
    from horizonml.machine.memory import keep_freed_memory
    from horizonml.machine.usage import rss_bytes
    from horizonml.planner.explain import remedy, shortage
    from horizonml.planner.planner import fixed_plan, needs_profile
    from horizonml.profiling.measure import cached_profile
    from horizonml.runtime.agreement import choose_or_say_why, describe_problem, describe_together, profile_key

    keep_freed_memory()
    cores = available_cores()
    if devices is not None:
        cluster = load_cluster(devices)
        names, hosts, network = cluster.names, cluster.hosts(), cluster.network()
        changes: dict[str, Any] = {"parallel.workers": len(names)}
        if job.parallel.stages is None and not as_given:
            changes["parallel.strategy"] = "auto"
            _say_what_is_not_used(job, devices, len(names))
        job = changed(job, changes)
        world_size, threads = len(names), 1
    else:
        world_size = job.parallel.world_size()
        names = [f"rank {rank}" for rank in range(world_size)]
        hosts = [Host(tuple(range(world_size)), cores, memory_limit() / world_size - rss_bytes())]
        network = Network(1e-4, 1e9)  # ranks of one machine
        threads = job.parallel.threads or threads_per_rank(cores, world_size)
    torch.set_num_threads(threads)
    info, model = describe_together(job, Group(None, 0, 1, 60.0))

    def measured() -> Profile:
        return cached_profile(model, profile_key(job), job.batch_size, lambda text: print(text, file=sys.stderr))

    if devices is None:
        profiles = [measured()] * world_size
    else:
        profiles = cluster.profiles(measured, model.chain.names, devices.parent)
    problem = describe_problem(job, model, info, profiles, hosts, network)
    if needs_profile(job.parallel, world_size):
        found = choose_or_say_why(job, model, problem)
    else:
        found = problem.judge(fixed_plan(job, len(model.chain), world_size))
    plan = found.plan
    by_channels = any(stage.splits_channels for stage in plan.stages)
    reason = None if by_channels else shortage(problem, found, names)  # what a split by channels needs is not known
    if reason is not None:
        raise PlanError(f"the plan does not fit the devices: {reason}. {remedy(problem, found)}")
    if out is not None:
        kind = job.parallel.strategy if job.parallel.stages is None else None
        write_plan(plan, out, kind, names if devices is not None else ())
    if picture is not None:
        from horizonml.report.run_plots import predicted

        predicted(found.plan, found.prediction, names, picture)
    if as_json:
        content = {"plan": plan.to_json(), "seconds": found.prediction.seconds, "profile": profiles[0].to_json()}
        print(json.dumps(content, indent=2))
        return
    _print_layers(job, profiles[0])
    _print_plan(job, problem, found, names, model, devices is not None)


def _say_what_is_not_used(job: Job, devices: Path, ranks: int) -> None:
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

    from horizonml.comm.group import Group
    from horizonml.machine.device import available_cores, memory_limit, threads_per_rank, versions
    from horizonml.machine.memory import keep_freed_memory
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


def plan_values(plan: Plan, strategy: str | None = None) -> dict[str, Any]:
    """Return a plan as a job's `parallel` section has it.

    Horovod is a `strategy` of the job, for stages do not say who sums their gradients.
    """
    if strategy == "horovod":
        return {"strategy": strategy, "workers": plan.world_size}
    stages = [
        {
            "ranks": list(stage.ranks),
            "shares": list(stage.shares),
            "split": "channels" if stage.splits_channels else "samples",
            "send": stage.send,
            "layers": [stage.start, stage.stop - 1],
        }
        for stage in plan.stages
    ]
    return {"schedule": plan.schedule, "micro_batches": plan.micro_batches, "stages": stages}


def write_plan(plan: Plan, path: Path, strategy: str | None = None, names: Sequence[str] = ()) -> None:
    """Write a plan as YAML for `horizonml train --plan`; `names` are those of the ranks' devices. Raises JobError."""
    lines = ["# A plan, made by `horizonml plan`: horizonml train JOB --plan THIS"]
    lines += [f"# rank {rank}: {name}" for rank, name in enumerate(names)]
    values = plan_values(plan, strategy)
    content = yaml.safe_dump(
        values, sort_keys=False, default_flow_style=None if "stages" in values else False, width=120
    )
    text = "\n".join([*lines, content])
    with writing(path):
        write_atomically(path, text.encode())


def read_plan(job: Job, path: Path) -> Job:
    """Return the job with the plan of a file. Raises JobError."""
    values = read_yaml(path, f"`horizonml plan JOB --out {path}` writes one")
    if isinstance(values, dict) and set(values) == {"schedule", "micro_batches", "stages"}:
        values = {**values, "workers": None}
    elif isinstance(values, dict) and set(values) == {"strategy", "workers"}:
        values = {**values, "micro_batches": None, "stages": None}
    else:
        raise JobError(f"{path}: not a plan; `horizonml plan JOB --out {path}` writes one")
    return changed(
        job, {f"parallel.{key}": value for key, value in values.items()}, f"{job.name} by the plan of {path}"
    )


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


def _print_plan(job: Job, problem: Problem, found: Found, names: list[str], model: Model, elsewhere: bool) -> None:
    from horizonml.planner.explain import bottleneck, compare, explain_parts, rows, why
    from horizonml.runtime.agreement import uncut_layer

    plan, layer_names = found.plan, model.chain.names
    print()
    if any(stage.splits_channels for stage in plan.stages):
        for line in plan.describe(layer_names).splitlines():
            print_text(line)
        print()
        print_text("no prediction: what layers send in their middle is not in the profile")
        return
    where = "" if elsewhere else " on this machine"
    shown = [
        [row.stage, row.layers, row.rank, row.rows, row.sends, row.memory, row.busy]
        for row in rows(problem, found, names, layer_names)
    ]
    micro_batches = count(plan.micro_batches, "micro-batch")
    print_table(
        f"plan for {count(problem.ranks, 'rank')}{where}: {plan.schedule}, {micro_batches}",
        ["stage", "layers", "rank", "rows", "sends", "memory", "busy"],
        shown[:40],
        text=(1, 2, 4),
    )
    if len(shown) > 40:
        print_text(f"... and {count(len(shown) - 40, 'more rank')} (--out writes them all)")
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
