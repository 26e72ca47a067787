"""Makes a job's plan, for this machine or for a cluster on paper, and shows why it is as it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from horizonml.cli.tables import print_table, print_text
from horizonml.errors import JobError
from horizonml.files import writing
from horizonml.job.jobfile import write_plan
from horizonml.job.schema import Job
from horizonml.machine.code import require
from horizonml.planner.devices import write_profile
from horizonml.planner.profile import Profile
from horizonml.text import count, human_bytes, human_seconds

if TYPE_CHECKING:
    from horizonml.runtime.planning import Planned


def show_plan(
    job: Job,
    devices: Path | None,
    as_json: bool,
    out: Path | None,
    picture: Path | None,
    as_given: bool = False,
    in_full: bool = False,
    only: Collection[str] = (),
) -> None:
    """Print a model's layers and the plan made of the job; write the plan, or a picture of it.

    With `devices`, for the cluster that the file describes: the job's explicit stages, else the best that is found, or
    the job's own strategy if `as_given`. Of its devices, those that are named `only` count, unless none is. `in_full`
    explains every choice, each cut and device too. Raises HorizonError, also for a plan that no device could carry out.
    """
    if picture is not None:
        require("matplotlib", "--picture")
        if picture.suffix.lower() != ".png":
            raise JobError(f"--picture: {picture} must end in .png, for pictures are PNG")
    from horizonml.runtime.planning import plan_job

    planned = plan_job(job, devices, as_given, _say, only)
    found, places, profiles = planned.found, planned.places, planned.profiles
    if out is not None:
        write_plan(found.plan, out, places.names if devices is not None else ())
        if found.plan.spare:
            kept = [name for rank, name in enumerate(places.names) if rank not in found.plan.spare]
            _say(f"{out} is for {count(len(kept), 'rank')}: {', '.join(f'{n}: {one}' for n, one in enumerate(kept))}")
    if picture is not None:
        from horizonml.planner.simulate import predict
        from horizonml.report.run_plots import predicted

        predicted(found.plan, predict(planned.problem, found.plan), places.names, picture)
    if as_json:
        from horizonml.planner.choose import energy_facts

        content = {
            "plan": found.plan.to_json(),
            "seconds": found.prediction.seconds,
            "energy": energy_facts(planned.problem, found) if planned.predicted else None,
            "worth": planned.worth.to_json() if planned.worth is not None else None,
            "reasons": [reason.to_json() for reason in planned.reasons()],
            "profile": profiles[0].to_json(),
        }
        print(json.dumps(content, indent=2))
        return
    _print_layers(planned.job, profiles[0])
    if planned.model.pretrained is not None:
        print()
        for note in planned.model.pretrained.notes:
            print_text(note)
    _print_plan(planned, in_full)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def show_profile(job: Job, out: Path | None, threads: int | None) -> None:
    """Measure a model's layers here, print them, and write them as YAML. Raises HorizonError."""
    import torch

    from horizonml.comm.group import Group
    from horizonml.machine.host import available_cores, keep_freed_memory, memory_limit, threads_per_rank, versions
    from horizonml.profiling.execution import execution_here, untried
    from horizonml.profiling.measure import cached_profile
    from horizonml.runtime.agreement import describe_together, profile_key
    from horizonml.runtime.checks import use_device

    keep_freed_memory()
    use_device(job, 0, _say)
    torch.set_num_threads(threads or threads_per_rank(available_cores(), 1))
    info, model = describe_together(job, Group(None, 0, 1, 60.0))
    steps = job.total_steps(-(-info.train // job.batch_size))
    execution = untried(job, execution_here(job, model, job.parallel.world_size(), steps, _say))
    profile = cached_profile(model, profile_key(job), job.batch_size, _say, execution)
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
    is_tuned = any(layer.trained < layer.parameter_bytes for layer in profile.layers)
    rows = [
        [
            str(number),
            layer.name,
            human_seconds(layer.forward[-1]),
            human_seconds(layer.backward[-1]),
            human_bytes(layer.parameter_bytes),
            *([human_bytes(layer.trained)] if is_tuned else []),
            human_bytes(layer.output_bytes),
        ]
        for number, layer in enumerate(profile.layers)
    ]
    samples = count(profile.sizes[-1], "sample")
    print_table(
        f"{job.model.name} on {profile.device}, forward and backward for {samples}:",
        ["layer", "name", "forward", "backward", "parameters", *["trained"] * is_tuned, "output/sample"],
        rows,
        text=(1,),
    )


def _print_plan(planned: Planned, in_full: bool) -> None:
    from horizonml.planner.explain import COLUMNS, explain_parts, rows
    from horizonml.planner.reasons import Told, compare
    from horizonml.runtime.agreement import uncut_layer

    job, model, problem, found, places = planned.job, planned.model, planned.problem, planned.found, planned.places
    plan, layer_names, names = found.plan, model.chain.names, places.names
    print()
    if not planned.predicted:
        for line in plan.describe(layer_names).splitlines():
            print_text(line)
        print()
        print_text("no prediction: what layers send in their middle is not in the profile")
        return
    shown = rows(problem, found, names, layer_names)
    micro_batches = count(plan.micro_batches, "micro-batch")
    spare = f", {len(plan.spare)} of them left out" if plan.spare else ""
    print_table(
        f"plan for {count(problem.ranks, 'rank')}{places.where}{spare}: {plan.schedule}, {micro_batches}",
        COLUMNS,
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
    whole = uncut_layer(model, problem)
    if whole is not None and len(plan.stages) > 1:
        print_text(f"{job.model.name}: {whole}.")
    for reason in planned.reasons(Told.IN_FULL if in_full else Told.PLAN):
        print_text(reason.text)
    if 1 < problem.ranks <= 200:
        print_text(compare(problem, found, names).text)
    if planned.worth is not None:
        print_text(f"Predicted: {planned.worth.words}.")
