"""The command that reports on runs: `horizonml report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from horizonml.machine.extras import require


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="A run (runs/NAME), a bench, or a folder of several.", show_default=False
        ),
    ],
    page: Annotated[
        Path | None,
        typer.Option(
            "--page", metavar="FILE", help="The page to write. Default: FOLDER/report.html.", show_default=False
        ),
    ] = None,
) -> None:
    """Write a page about runs and benches.

    The page has findings in words, tables, and pictures of where the time went. It is one HTML file; its pictures, and
    the numbers as CSV and JSON, are written beside the records.
    """
    require("matplotlib", "`horizonml report`")
    from horizonml.bench.report import write_report

    for path in write_report(folder, page):
        print(path)
