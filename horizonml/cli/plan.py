"""The commands about plans: `horizonml plan`, `simulate` and `profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from horizonml.cli.options import Device, JobFile, MeasureAgain, Overrides, Workers, load_job


def plan(
    job_file: JobFile,
    overrides: Overrides = None,
    workers: Workers = None,
    devices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Plan for the devices and links of this file instead of this machine; see examples/devices.yaml. "
            "Shows the best plan for all of these devices, whatever the job's strategy and workers.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the plan to this file, for `train --plan`.", show_default=False),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw a step of the plan, rank by rank, to this file (PNG).", show_default=False
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON, with a reason for each choice.")
    ] = False,
    in_full: Annotated[
        bool,
        typer.Option(
            "--why", help="Explain every choice: also each cut, exact link and device, and what the run decides."
        ),
    ] = False,
    device: Device = None,
    measure_again: MeasureAgain = False,
) -> None:
    """Show the plan for a job, and explain it.

    The output lists the model's layers with their measured times, says which rank computes which of them and what
    limits the plan, and compares the plan with simpler ones.
    """
    from horizonml.cli.planning import show_plan

    show_plan(load_job(job_file, overrides, workers), devices, as_json, out, picture, in_full=in_full)


def simulate(
    job_file: JobFile,
    plan_file: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A plan that `horizonml plan --out` wrote.", show_default=False)
    ],
    devices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The devices and links to predict it for; default: this machine.", show_default=False
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the step, rank by rank, to this file (PNG).", show_default=False),
    ] = None,
    overrides: Overrides = None,
    device: Device = None,
    measure_again: MeasureAgain = False,
) -> None:
    """Predict the time and memory of a given plan.

    Also shows what limits it. The devices need not be there, but must be as many as the plan has ranks; those of a file
    that the plan leaves out do not count.
    """
    from horizonml.cli.planning import show_plan
    from horizonml.job.planfile import read_devices, read_plan

    job, only = read_plan(load_job(job_file, overrides), plan_file), read_devices(plan_file)
    show_plan(job, devices, False, None, picture, as_given=True, only=only)


def profile(
    job_file: JobFile,
    overrides: Overrides = None,
    device: Device = None,
    measure_again: MeasureAgain = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write it there as YAML, for a device in `plan --devices`.", show_default=False
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Threads to measure with. Default: the cores.", show_default=False),
    ] = None,
) -> None:
    """Measure a model's layers on this device.

    Shows the time of each layer's forward and backward pass, and the size of its parameters and outputs. Times are
    measured once for a model, a device and a version of torch, and kept; --measure-again measures them anew.
    """
    from horizonml.cli.planning import show_profile

    show_profile(load_job(job_file, overrides), out, threads)
