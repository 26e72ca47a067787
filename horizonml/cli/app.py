"""The command line: all commands in one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperArgument

from horizonml import __version__
from horizonml.cli.bench import app as bench
from horizonml.cli.cluster import app as cluster
from horizonml.cli.export import evaluate, export, generate, predict
from horizonml.cli.jobs import init, schema, validate
from horizonml.cli.plan import plan, profile, simulate, what_if
from horizonml.cli.rendezvous import rendezvous, token
from horizonml.cli.top import log, report, top, watch
from horizonml.cli.train import train
from horizonml.cli.up import join, up
from horizonml.errors import JobError

TyperArgument.display_type_rich = lambda self, ctx: None  # type: ignore[method-assign]  # "JOB", not "JOB <path>"

app = typer.Typer(
    name="horizonml",
    help="Train a neural network together on the small machines you already have.\n\n"
    "Start with: horizonml train digits --set parallel.strategy=pipeline --workers 5\n\n"
    "For your own model or data: horizonml init",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text: no types of flags, and paragraphs that fill the line
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def chaos(context: typer.Context) -> None:
    """Go on with `python -m benchmarks.chaos`, which lies in the repository and no longer in the package."""
    words = "horizonml chaos is now called python -m benchmarks.chaos"
    if not Path("benchmarks/chaos").is_dir():
        raise JobError(f"{words}, in the folder of HorizonML's repository")
    print(f"warning: {words}", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.chaos", *context.args])  # noqa: S606


for command in (train, up, join, init, validate, schema, plan, simulate, profile):
    app.command()(command)
# What comes after a command to start belongs to that command.
app.command(context_settings={"allow_interspersed_args": False})(rendezvous)
app.command()(token)
app.command()(evaluate)
app.command()(predict)
app.command()(generate)
app.command()(export)
app.command()(report)
app.command()(watch)
app.command()(top)
app.command("what-if")(what_if)
app.command()(log)
app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(chaos)
app.add_typer(bench, name="bench")
app.add_typer(cluster, name="cluster")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"horizonml {__version__}")
        raise typer.Exit
