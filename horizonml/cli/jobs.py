"""The commands about job files: `horizonml init`, `validate` and `schema`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from horizonml.cli.options import JobFile, Overrides, Workers, load_job
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

    if as_schema:
        schema()
        return
    if job_file is None:
        raise JobError("name a job file, or use --schema")

    job = load_job(job_file, overrides, workers)
    if ":" in job.model.name:
        from horizonml.models.source import find

        find(job.model.name)
    print(yaml.safe_dump(job.model_dump(exclude_none=True), sort_keys=False), end="")
    print(f"# {job_file} is a valid job", file=sys.stderr)


def schema() -> None:
    """Print the job file's JSON schema, for editors."""
    from horizonml.job.jobfile import json_schema

    print(json.dumps(json_schema(), indent=2))
