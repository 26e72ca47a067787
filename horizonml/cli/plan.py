"""The command about plans, `horizonml plan`: for a job, for a given plan, and for a run with other devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from horizonml.cli.options import Device, JobFile, MeasureAgain, Overrides, Workers, load_job
from horizonml.errors import JobError

_PLAN = "A plan that `horizonml plan --out` wrote."
_Devices = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Plan for the devices and links of this file instead of this machine; see examples/devices.yaml. Shows "
        "the best plan for all of these devices, whatever the job's strategy and workers.",
        show_default=False,
    ),
]
_Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the plan to this file, for `train --plan`; with --profile, the profile, for a device in a file of "
        "`--devices`.",
        show_default=False,
    ),
]
_Picture = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw a step of the plan, rank by rank, to this file (PNG).", show_default=False),
]
_Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="With --profile: threads to measure with. Default: the cores.", show_default=False
    ),
]
_Add = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DEVICE",
        help="For a run: add a device (repeatable): like:RANK, and then what differs, after commas: speed=0.5 "
        "(relative to that rank's), memory=1GiB, rate=100Mbit and latency=2ms of its links, watts=2.5/6 (idle/busy), "
        "name=NAME. Without like, give speed (relative to rank 0's), memory and rate.",
    ),
]
_Remove = Annotated[
    list[str] | None,
    typer.Option(metavar="RANK", help="For a run: remove a device, by its rank or its name (repeatable)."),
]
_Rate = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LINK=RATE",
        help="For a run: change how fast a link is (repeatable): 0-1=100Mbit between two ranks, 2=20Mbit for all links "
        "of a rank, all=50Mbit for all links; with a latency, 0-1=100Mbit,5ms.",
    ),
]
_Strategy = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="For a run: plan by another strategy than its job's: auto, ddp, hybrid, pipeline.",
        show_default=False,
    ),
]
_Seconds = Annotated[float, typer.Option(metavar="S", help="For a run: give up after S seconds of planning.")]


def plan(
    job_file: JobFile,
    overrides: Overrides = None,
    workers: Workers = None,
    devices: _Devices = None,
    out: _Out = None,
    picture: _Picture = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON, with a reason for each choice.")
    ] = False,
    in_full: Annotated[
        bool,
        typer.Option(
            "--why", help="Explain every choice: also each cut, exact link and device, and what the run decides."
        ),
    ] = False,
    given: Annotated[
        Path | None,
        typer.Option(metavar="PLAN", help=f"Predict this plan instead of making one. {_PLAN}", show_default=False),
    ] = None,
    measures: Annotated[
        bool,
        typer.Option("--profile", help="Only measure the model's layers on this device: their times and sizes."),
    ] = False,
    threads: _Threads = None,
    add: _Add = None,
    remove: _Remove = None,
    rate: _Rate = None,
    strategy: _Strategy = None,
    seconds: _Seconds = 60.0,
    device: Device = None,
    measure_again: MeasureAgain = False,
) -> None:
    """Plan a job and explain why, or a run with other devices.

    The output lists the model's layers with their measured times, says which rank computes which of them and what
    limits the plan, and compares the plan with simpler ones.

    horizonml plan jobs/cifar10.yaml --devices examples/devices.yaml

    horizonml plan jobs/cifar10.yaml --profile --out pi.yaml

    horizonml plan runs/digits --remove 1 --rate 0-2=20Mbit
    """
    changes = {"--add": add, "--remove": remove, "--rate": rate}
    of_a_job = {
        "--set": overrides,
        "--workers": workers,
        "--devices": devices,
        "--out": out,
        "--picture": picture,
        "--why": in_full,
        "--given": given,
        "--profile": measures,
        "--threads": threads,
    }
    if job_file.is_dir():
        _refuse(of_a_job, f"{job_file} is a run's folder, and", "for a job")
        answer = _what_if(job_file, changes, strategy, seconds)
        if as_json:
            print(json.dumps(answer, indent=2, allow_nan=False))
        else:
            _print(answer)
        return
    from horizonml.cli.planning import show_plan, show_profile
    from horizonml.job.jobfile import read_devices, read_plan

    _refuse({**changes, "--strategy": strategy}, f"{job_file} is a job, and", "for a run's folder, such as runs/digits")
    if measures:
        _refuse({name: of_a_job[name] for name in ("--workers", "--devices", "--picture", "--given")}, "--profile:", "")
        show_profile(load_job(job_file, overrides), out, threads)
    elif given is not None:  # devices of a file that the plan leaves out do not count
        job, only = read_plan(load_job(job_file, overrides), given), read_devices(given)
        show_plan(job, devices, False, None, picture, as_given=True, only=only)
    else:
        show_plan(load_job(job_file, overrides, workers), devices, as_json, out, picture, in_full=in_full)


def _refuse(options: Mapping[str, object], before: str, meant: str) -> None:
    """Raise JobError if one of these options is given, which has no meaning here."""
    given = [name for name, value in options.items() if value]
    if given:
        raise JobError(
            f"{before} {', '.join(given)} {f'can only be used {meant}' if meant else 'cannot be used with it'}"
        )


def _what_if(
    run: Path, changes: Mapping[str, list[str] | None], strategy: str | None, seconds: float
) -> dict[str, Any]:
    """Return what other devices or links would change about a run; everything comes from what rank 0 has recorded."""
    from horizonml.report.what_if import what_if

    rates: dict[str, str] = {}
    for text in changes["--rate"] or []:
        link, sign, value = text.partition("=")
        if not sign:
            raise JobError(f"--rate: {ascii(text)[:60]} lacks a rate; write for example 0-1=100Mbit")
        rates[link] = value
    return what_if(run, changes["--add"] or (), changes["--remove"] or (), rates, strategy, seconds)


def _print(answer: dict[str, Any]) -> None:
    from horizonml.cli.tables import print_table, print_text
    from horizonml.planner.explain import COLUMNS
    from horizonml.text import count, human_seconds

    present, predicted = answer["present"], answer["predicted"]
    ranks = count(len(predicted["devices"]), "rank")
    micro_batches = count(predicted["micro_batches"], "micro-batch")
    print_table(
        f"{answer['run']}, predicted plan for {ranks}: {predicted['schedule']}, {micro_batches}",
        COLUMNS,
        predicted["table"],
        text=(1, 2, 4),
    )
    print()
    for line in answer["changes"]:
        print_text(line)
    print_text(f"That is {predicted['samples_per_second']:,.0f} samples/s: {predicted['parts_text']}.")
    if present["measured_seconds"] is not None:
        print_text(
            f"Measured until now: {human_seconds(present['measured_seconds'])} a step. If the prediction errs as much "
            f"after the change, that becomes {human_seconds(predicted['scaled_seconds'])}."
        )
    print()
    for line in [*answer["why"], *answer["notes"]]:
        print_text(line)
