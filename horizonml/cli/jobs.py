"""The commands about job files: `horizonml init`, `validate` and `schema`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from horizonml.cli.options import JobFile, Overrides, Workers, load_job


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where to write them; it is made if it is not there.")
    ] = Path(),
) -> None:
    """Write a commented job file and a model to start from."""
    import shlex

    from horizonml.starter import FILES, write

    for path, about in zip(write(folder), FILES.values(), strict=True):
        print(f"{path}: {about}")
    there = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    print(f"\nnext: {there}horizonml train job.yaml")


def validate(job_file: JobFile, overrides: Overrides = None, workers: Workers = None) -> None:
    """Check a job file and the code that it names.

    The job is shown with all defaults filled in.
    """
    import yaml

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
