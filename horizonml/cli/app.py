"""The command line: all commands in one."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperGroup

from horizonml import __version__
from horizonml.cli.bench import app as bench
from horizonml.cli.checkpoints import checkpoints
from horizonml.cli.cluster import app as cluster
from horizonml.cli.doctor import doctor
from horizonml.cli.export import evaluate, export, generate, predict
from horizonml.cli.plan import plan
from horizonml.cli.relay import relay
from horizonml.cli.runs import logs, ls, stop
from horizonml.cli.tokens import devices, token
from horizonml.cli.train import init, train, validate
from horizonml.cli.up import join, rendezvous, up
from horizonml.cli.watch import report, watch

TyperArgument.display_type_rich = lambda self, ctx: None  # type: ignore[method-assign]  # "JOB", not "JOB <path>"

_GROUPS = {
    "Train": "train init validate plan",
    "Devices": "up join relay doctor devices token rendezvous cluster",
    "Watch": "ls watch logs stop report bench",
    "Use": "evaluate predict generate export checkpoints",
}


class _Groups(TyperGroup):
    """Lists the commands in groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each group under its name."""
        for title, names in _GROUPS.items():
            commands = [(name, self.commands[name]) for name in names.split()]
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str(limit=67)) for name, command in commands])


app = typer.Typer(
    name="horizonml",
    cls=_Groups,
    help="Train a neural network together on the small machines you already have.\n\n"
    "Start with: horizonml train digits --set parallel.strategy=pipeline --workers 5\n\n"
    "For your own model or data: horizonml init",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text: no types of flags, and paragraphs that fill the line
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


for command in (
    train, init, validate, plan, up, join, relay, doctor, devices, token, ls, watch, logs, stop, report, evaluate,
    predict, generate, export, checkpoints,
):  # fmt: skip
    app.command()(command)
# What comes after a command to start belongs to that command.
app.command(context_settings={"allow_interspersed_args": False})(rendezvous)
app.add_typer(cluster, name="cluster")
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"horizonml {__version__}")
        raise typer.Exit


tree = typer.main.get_command(app)  # of all commands, made once for all processes that are forked from this one
