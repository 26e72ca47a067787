"""The command line: all commands in one, and what becomes of their errors."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from typing import Annotated, NoReturn

import typer
from typer.core import TyperArgument

from horizonml import __version__
from horizonml.cli.bench import app as bench
from horizonml.cli.chaos import chaos
from horizonml.cli.cluster import app as cluster
from horizonml.cli.export import export
from horizonml.cli.jobs import init, schema, validate
from horizonml.cli.log import log
from horizonml.cli.plan import plan, profile, simulate
from horizonml.cli.rendezvous import rendezvous
from horizonml.cli.report import report
from horizonml.cli.train import train
from horizonml.errors import HorizonError, OutOfMemory, is_out_of_memory
from horizonml.machine.signals import watch_launcher

TyperArgument.display_type_rich = lambda self, ctx: None  # type: ignore[method-assign]  # "JOB", not "JOB <path>"

app = typer.Typer(
    name="horizonml",
    help="Train a neural network together on the small machines you already have.\n\n"
    "Start with: horizonml train digits --set parallel.strategy=pipeline --workers 5\n\n"
    "Your own: horizonml init",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text: no types of flags, and paragraphs that fill the line
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for command in (train, init, validate, schema, plan, simulate, profile):
    app.command()(command)
# What comes after a command to start belongs to that command.
app.command(context_settings={"allow_interspersed_args": False})(rendezvous)
app.command()(export)
app.command()(report)
app.command()(log)
app.command()(chaos)
app.add_typer(bench, name="bench")
app.add_typer(cluster, name="cluster")


def main() -> NoReturn:
    """Run a command, and print the errors that are meant for the user without a traceback."""
    watch_launcher()
    faulthandler.enable()  # an instruction that the processor lacks, in PyTorch, would end this without a word
    logging.basicConfig(level=os.environ.get("HORIZONML_LOG", "WARNING").upper(), format="%(levelname)s: %(message)s")
    code: int | str | None = 0
    try:
        app()
    except HorizonError as error:
        code = _print_error(error)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code
    except Exception as error:
        if is_out_of_memory(error):
            code = _print_error(OutOfMemory())
        else:  # a bug: show it all
            logging.exception("please report this")
            code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    # Unloading torch takes a quarter of a second, and threads inside it may still talk to the network.
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _print_error(error: HorizonError) -> int:
    """Print an error, and return its exit code."""
    sys.stdout.flush()  # what was said before comes before
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"horizonml {__version__}")
        raise typer.Exit
