"""The commands about jobs: `horizonml init`, `validate`, `schema` and `train`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from horizonml.cli.options import Device, Emulate, Fresh, JobFile, MeasureAgain, Overrides, Workers, load_job
from horizonml.errors import JobError
from horizonml.text import nearest


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder to write to; it is created if it does not exist.")
    ] = Path(),
    data: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="What to train on: digits (part of the package), images (your own, in one folder per class), table "
            "(CSV or Parquet files), text (for a small GPT), or own (a data set of your own, in Python).",
        ),
    ] = "digits",
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="own (a network of your own, in Python; for text, a small GPT), or the name of a built-in model such "
            "as resnet18.",
        ),
    ] = "own",
) -> None:
    """Write a commented job file to start from.

    If the job names code of your own, a small example of that code is written beside it.

    horizonml init first

    horizonml init flowers --data images --model resnet18
    """
    import shlex

    from horizonml.job.starter import write
    from horizonml.models.spec import MODELS

    if model not in ("own", *MODELS) and ":" not in model:
        raise JobError(f"--model: {model!r} is neither own nor one of {', '.join(MODELS)}{nearest(model, MODELS)}")
    for path, about in write(folder, data, model).items():
        print(f"{path}: {about}")
    there = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    before = "" if data in ("digits", "text", "own") else "set the path of your data in job.yaml, then "
    print(f"\nnext: {before}{there}horizonml train job.yaml")


def validate(
    job_file: Annotated[Path | None, JobFile.__metadata__[0]] = None,
    overrides: Overrides = None,
    workers: Workers = None,
    as_schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of job files instead, for editors.")
    ] = False,
) -> None:
    """Check a job file and the code that it names.

    The job is shown with all defaults filled in.
    """
    import yaml

    from horizonml.job.jobfile import json_schema

    if as_schema:
        print(json.dumps(json_schema(), indent=2))
        return
    if job_file is None:
        raise JobError("name a job file, or use --schema")

    job = load_job(job_file, overrides, workers)
    if ":" in job.model.name:
        from horizonml.models.source import find

        find(job.model.name)
    print(yaml.safe_dump(job.model_dump(exclude_none=True), sort_keys=False), end="")
    print(f"# {job_file} is a valid job", file=sys.stderr)


def train(
    job_file: JobFile,
    overrides: Overrides = None,
    workers: Workers = None,
    device: Device = None,
    measure_again: MeasureAgain = False,
    emulate: Emulate = None,
    fresh: Fresh = False,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            envvar="HORIZONML_METRICS",
            help="Serve Prometheus metrics at /metrics, with /healthz and /readyz. HOST is 127.0.0.1 if not given, "
            "0.0.0.0 for other machines; further ranks on a machine take the ports after it.",
            show_default=False,
        ),
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan", metavar="FILE", help="Train by the plan that `horizonml plan --out` wrote.", show_default=False
        ),
    ] = None,
    stay: Annotated[
        bool,
        typer.Option(
            "--stay",
            envvar="HORIZONML_STAY",
            help="As a rank, go on serving metrics when the job is done, until SIGTERM.",
        ),
    ] = False,
    join: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            envvar="HORIZONML_JOIN",
            help="Become one more rank of the run that meets at this rendezvous service, with a number that the "
            "service gives; parallel.max_workers limits how many there may be.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="SEED,SEED,...",
            help="Train once with each of these seeds, one run after the other on this machine, and show the mean and "
            "the standard deviation of their metrics. Each run has its own folder, seed-SEED, inside the job's.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a job.

    If torchrun, Compose, Kubernetes, mpirun or srun starts this process, it is one rank of the job; with --join, it is
    one more rank of a run. If you start it by hand, it runs the rendezvous service and all ranks on this machine. The
    run goes on from its newest checkpoint, if there is one. Ctrl-C saves a checkpoint and stops.
    """
    from horizonml.machine.network import metrics_address
    from horizonml.rendezvous.identity import identify

    if (workers or 1) > 1 and not join and identify(os.environ, workers) is None:
        from horizonml.runtime.forkserver import start_ahead

        start_ahead()
    job = load_job(job_file, overrides, workers)
    if plan_file is not None:
        from horizonml.job.jobfile import read_plan

        job = read_plan(job, plan_file)
    identity = join or identify(os.environ, job.parallel.max_workers)
    if emulate is not None and identity is not None:
        raise JobError("--emulate: only ranks that this command starts by itself can stand for other devices")
    metrics_at = metrics_address(metrics)
    if identity is None:
        from horizonml.runtime.launch import PatientStream, for_this_machine

        sys.stdout = PatientStream(sys.stdout)
        job = for_this_machine(job, lambda text: print(text, flush=True))
    if seeds is not None:
        from horizonml.cli.seeds import parse_seeds, train_seeds

        if identity is not None:
            raise JobError("--seeds: several seeds are trained on this machine; start one run per seed with a launcher")
        if not train_seeds(job, parse_seeds(seeds), fresh, metrics_at):
            sys.exit(130)
        return
    if identity is None:
        from horizonml.runtime.launch import train_here

        if not train_here(job, fresh, metrics_at):
            sys.exit(130)
        saved = f", and `horizonml export {job.run_folder} model.pt` writes the model" if job.checkpoint.enabled else ""
        print(f"`horizonml report {job.run_folder}` shows how it went{saved}")
        return
    from horizonml.runtime.launch import train_as_rank
    from horizonml.runtime.outcome import Outcome

    outcome = train_as_rank(job, identity, fresh, metrics_at, stay)
    if outcome in (Outcome.STOPPED, Outcome.STOPPED_WAITING) and "JOB_COMPLETION_INDEX" in os.environ:
        sys.exit(
            128 + signal.SIGTERM
        )  # an Indexed Job takes 0 for the end of the rank's work, and never starts it again
