"""The command line: parse, call, print."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer.core import TyperArgument

from horizonml import __version__
from horizonml.cli.bench import app as bench
from horizonml.cli.cluster import app as cluster
from horizonml.errors import HorizonError, OutOfMemory, is_out_of_memory
from horizonml.machine.extras import require
from horizonml.machine.signals import watch_launcher

if TYPE_CHECKING:
    from horizonml.job.schema import Job

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

app.add_typer(bench, name="bench")
app.add_typer(cluster, name="cluster")

JobFile = Annotated[
    Path,
    typer.Argument(
        metavar="JOB",
        help="A job file (YAML), or a ready job: cifar10, digits, explicit-plan, folder, synthetic. A job file whose "
        "model is `module:callable` runs that code: use only those that you trust.",
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


def main() -> NoReturn:
    """Entry point: errors meant for the user are printed without a traceback."""
    watch_launcher()
    faulthandler.enable()  # an instruction that the processor lacks, in PyTorch, would end this without a word
    logging.basicConfig(level=os.environ.get("HORIZONML_LOG", "WARNING").upper(), format="%(levelname)s: %(message)s")
    code: int | str | None = 0
    try:
        app()
    except HorizonError as error:
        code = _told(error)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code
    except Exception as error:
        if is_out_of_memory(error):
            code = _told(OutOfMemory())
        else:  # a bug: show it all
            logging.exception("please report this")
            code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    # Unloading torch takes a quarter of a second, and threads inside it may still talk to the network.
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _told(error: HorizonError) -> int:
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


@app.command()
def train(
    job_file: JobFile,
    overrides: Overrides = None,
    workers: Workers = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; the run before is kept beside it as NAME.previous.")
    ] = False,
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
) -> None:
    """Train a job.

    Started by torchrun, Compose, Kubernetes, mpirun or srun, this process is one rank of the job. Started by hand, it
    runs the rendezvous service and all ranks on this machine. The run goes on from its newest checkpoint, if there is
    one. Ctrl-C saves a checkpoint and stops.
    """
    from horizonml.rendezvous.identity import identify

    job = _load(job_file, overrides, workers)
    if plan_file is not None:
        from horizonml.cli.planning import read_plan

        job = read_plan(job, plan_file)
    identity = identify(os.environ)
    metrics_at = _metrics_address(metrics)
    if identity is None:
        from horizonml.runtime.launch import train_here

        if not train_here(job, fresh, metrics_at):
            sys.exit(130)
        return
    from horizonml.runtime.launch import train_as_rank

    train_as_rank(job, identity, fresh, metrics_at, stay)


def _metrics_address(text: str | None) -> tuple[str, int] | None:
    from horizonml.errors import JobError
    from horizonml.machine.network import split_address

    if not text:
        return None
    try:
        host, port = split_address(text)
        if not 0 <= port <= 65535:
            raise ValueError
    except ValueError:
        raise JobError(f"--metrics: {text!r} is not [HOST:]PORT, for example 9400 or 0.0.0.0:9400") from None
    return host or "127.0.0.1", port


@app.command()
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


@app.command()
def validate(job_file: JobFile, overrides: Overrides = None, workers: Workers = None) -> None:
    """Check a job file and the code that it names.

    The job is shown with all defaults filled in.
    """
    import yaml

    job = _load(job_file, overrides, workers)
    if ":" in job.model.name:
        from horizonml.models.source import find

        find(job.model.name)
    print(yaml.safe_dump(job.model_dump(exclude_none=True), sort_keys=False), end="")
    print(f"# {job_file} is a valid job", file=sys.stderr)


@app.command()
def schema() -> None:
    """Print the job file's JSON schema, for editors."""
    from horizonml.job.jobfile import json_schema

    print(json.dumps(json_schema(), indent=2))


@app.command()
def plan(
    job_file: JobFile,
    overrides: Overrides = None,
    workers: Workers = None,
    devices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Plan for the devices and links of this file instead of this machine; see examples/devices.yaml. "
            "The best plan for all of them is shown, whatever the job's strategy and workers.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the plan there; `train --plan` takes it.", show_default=False),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw a step of the plan, rank by rank, there (PNG).", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show the plan for a job, and why it is as it is.

    First the model's layers and their measured times, then who gets which of them, what limits the plan, and how
    simpler plans compare.
    """
    from horizonml.cli.planning import show_plan

    show_plan(_load(job_file, overrides, workers), devices, as_json, out, picture)


@app.command()
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
        Path | None, typer.Option(metavar="FILE", help="Draw the step, rank by rank, there (PNG).", show_default=False)
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Predict the time and memory of a given plan.

    Also shows what limits it. The devices need not be there, but must be as many as the plan has ranks.
    """
    from horizonml.cli.planning import read_plan, show_plan

    show_plan(read_plan(_load(job_file, overrides, None), plan_file), devices, False, None, picture, as_given=True)


@app.command()
def profile(
    job_file: JobFile,
    overrides: Overrides = None,
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
    measured once for a model, a device and a version of torch, and kept.
    """
    from horizonml.cli.planning import show_profile

    show_profile(_load(job_file, overrides, None), out, threads)


@app.command(context_settings={"allow_interspersed_args": False})
def rendezvous(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND",
            help="A command that starts ranks, after `--`; the service ends with it.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for other machines (trusted networks only)."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            max=65535,
            help="Port to listen on; 0 for any free one. Default: 29400; before a command any.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Name or address under which COMMAND's ranks reach this machine. Default: its host name.",
        ),
    ] = None,
    inherited: Annotated[int | None, typer.Option("--inherited", hidden=True)] = None,
) -> None:
    """Serve the rendezvous, where the ranks of a job meet.

    Alone it serves until it is stopped. Before a command that starts ranks it serves for as long as that runs, and
    tells it the address in HORIZONML_RENDEZVOUS, whatever the launcher:

        horizonml rendezvous -- mpirun -n 4 horizonml train digits

    The service has no authentication: whoever reaches its port can disturb the job.
    """
    from horizonml.runtime.launch import serve_rendezvous

    port = port if port is not None else 0 if command else 29400
    code = serve_rendezvous(host, port, inherited, advertise, command or [])
    if code:
        raise typer.Exit(code)


@app.command()
def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A checkpoint, or a run's folder (its newest intact one).", show_default=False
        ),
    ],
    output: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file to write, e.g. model.pt.", show_default=False)
    ],
) -> None:
    """Write a checkpoint's weights as a PyTorch state dict."""
    from horizonml.state.shards import export as export_checkpoint

    metadata = export_checkpoint(checkpoint, output)
    accuracy, epoch = metadata.metrics.get("held_out_accuracy"), metadata.metrics.get("epoch")
    measured = "" if accuracy is None else f", held-out accuracy {accuracy:.2%}"
    when = "" if accuracy is None or epoch is None else f" after epoch {epoch}"
    print(f"wrote {output} (step {metadata.step}{measured}{when})")


@app.command()
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

    It has findings in words, tables, and pictures of where the time went. The page is one HTML file; its pictures, and
    the numbers as CSV and JSON, are written beside the records.
    """
    require("matplotlib", "`horizonml report`")
    from horizonml.bench.report import write_report

    for path in write_report(folder, page):
        print(path)


def _load(path: Path, overrides: list[str] | None, workers: int | None) -> Job:
    from horizonml.job.jobfile import load

    extra = [f"parallel.workers={workers}"] if workers is not None else []
    return load(path, [*(overrides or []), *extra])
