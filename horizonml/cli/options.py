"""The options that several families of commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from horizonml.job.schema import Job


JobFile = Annotated[
    Path,
    typer.Argument(
        metavar="JOB",
        help="A job file (YAML), or a ready job: cifar10, digits, explicit-plan, folder, synthetic, text. A job file "
        "whose model is `module:callable` runs that code: use only those that you trust.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a field of the job, e.g. optimizer.lr=0.1 (repeatable)."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-n",
        metavar="N",
        min=1,
        help="World size; short for --set parallel.workers=N.",
        show_default=False,
    ),
]


def load_job(path: Path, overrides: list[str] | None, workers: int | None = None) -> Job:
    """Return the job of a file with the options that override its fields. Raises JobError."""
    from horizonml.job.jobfile import load

    extra = [f"parallel.workers={workers}"] if workers is not None else []
    return load(path, [*(overrides or []), *extra])
