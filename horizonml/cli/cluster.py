"""The commands about jobs in Kubernetes, `horizonml cluster`, and the table that shows a job's ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from horizonml.cli.tables import layout, print_text, terminal_width
from horizonml.errors import ClusterError, JobError
from horizonml.machine.code import require
from horizonml.text import count, escaped

if TYPE_CHECKING:
    from horizonml.job.schema import Job
    from horizonml.kube.api import KubeCluster
    from horizonml.kube.render import ManifestSettings
if TYPE_CHECKING:
    from horizonml.kube.status import RankStatus


_HEADINGS = ("rank", "node", "phase", "stage", "epoch", "step", "samples/s", "loss", "time*")


def _cells(entry: RankStatus) -> list[str]:
    """Return a row of the table, as text."""
    split = [entry.compute, entry.transfer, entry.wait]
    return [
        str(entry.rank),
        entry.node or "-",
        entry.phase,
        entry.stage or "-",
        f"{entry.epoch}/{entry.epochs}" if entry.epoch is not None else "-",
        f"{entry.step}/{entry.steps}" if entry.step is not None else "-",
        _or_dash(entry.samples_per_second, "{:,.0f}"),
        _or_dash(entry.loss, "{:.4f}"),
        "/".join(f"{100 * part:.0f}" for part in split if part is not None) + "%" if None not in split else "-",
    ]


def rank_table(rows: Sequence[RankStatus], width: int | None) -> str:
    """Return the state of all ranks as a table of at most `width` columns."""
    table = layout(_HEADINGS, [_cells(entry) for entry in rows], text=(1, 2), width=width)
    return f"{table}\n* % of compute/transfer/wait"


def _or_dash(value: float | None, text: str) -> str:
    return "-" if value is None else text.format(value)


app = typer.Typer(
    help="Run jobs in a Kubernetes cluster: one job per namespace.\n\n"
    "Start with: horizonml cluster submit digits --workers 5",
    no_args_is_help=True,
)

Namespace = Annotated[
    str, typer.Option("--namespace", metavar="NAME", help="The job's namespace; it is made if it is not there.")
]
Submitted = Annotated[str, typer.Option("--namespace", metavar="NAME", help="The job's namespace.")]
Context = Annotated[str | None, typer.Option(metavar="NAME", help="Context of the kubeconfig.", show_default=False)]
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
_PATIENCE = 60.0  # seconds for which `submit --wait` watches a problem before it gives up


@app.command()
def submit(
    job_file: Annotated[
        Path, typer.Argument(metavar="JOB", help="A job file (YAML), or a ready job by its name.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a field of the job (repeatable).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", metavar="N", min=1, help="World size.", show_default=False)
    ] = None,
    image: Annotated[str | None, typer.Option(metavar="NAME", help="Image of the workers.", show_default=False)] = None,
    cpu: Annotated[
        str | None, typer.Option(metavar="AMOUNT", help="Cores of each worker, e.g. 400m or 4.", show_default=False)
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="AMOUNT", help="Memory of each worker, e.g. 1Gi.", show_default=False)
    ] = None,
    storage_class: Annotated[
        str | None, typer.Option(metavar="NAME", help="Storage class of the workers' disks.", show_default=False)
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job is complete.")] = False,
    namespace: Namespace = "horizonml",
    context: Context = None,
) -> None:
    """Start a job in the cluster, or change the one that runs there.

    Submitting again with another job file or number of workers restarts the workers, which go on from their newest
    checkpoint where the job allows it.
    """
    from horizonml.job.jobfile import load

    extra = [f"parallel.workers={workers}"] if workers is not None else []
    job = load(job_file, [*(overrides or []), *extra])
    _check_quantities({"--cpu": cpu, "--memory": memory})
    from horizonml.kube.render import ManifestSettings

    settings = ManifestSettings(namespace, job.parallel.world_size(), image, cpu, memory, storage_class)
    cluster = _connect(namespace, context)
    _apply(cluster, job, settings)
    print(f"\nwatch it: horizonml cluster top{_suffix(namespace, context)}")
    if wait:
        _wait(cluster)


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    namespace: Submitted = "horizonml",
    context: Context = None,
) -> None:
    """Show where every rank runs, how fast, and what is wrong."""
    import json

    rows, conditions = _connect(namespace, context).observe(1.0)
    from horizonml.kube.status import problems

    wrong = problems(rows, conditions)
    if as_json:
        print(json.dumps({"ranks": [entry.to_json() for entry in rows], "problems": wrong}, indent=2))
        return
    print(rank_table(rows, terminal_width()))
    for problem in wrong:
        print_text(f"problem: {problem}")


@app.command()
def top(namespace: Submitted = "horizonml", context: Context = None) -> None:
    """Show the same as `status`, live; Ctrl-C ends it."""
    if not sys.stdout.isatty():
        status(False, namespace, context)
        return
    from rich.live import Live
    from rich.text import Text

    cluster = _connect(namespace, context)
    from horizonml.kube.status import problems

    try:
        with Live(refresh_per_second=4) as live:
            while True:
                rows, conditions = cluster.observe(2.0)
                lines = [
                    rank_table(rows, terminal_width()),
                    *(f"problem: {text}" for text in problems(rows, conditions)),
                ]
                live.update(Text("\n".join(lines)))
    except KeyboardInterrupt:
        return


@app.command()
def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C, also over restarts.")] = False,
    rank: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only this rank.", show_default=False)] = None,
    tail: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Only so many last lines of each.", show_default=False)
    ] = None,
    namespace: Submitted = "horizonml",
    context: Context = None,
) -> None:
    """Show the logs of all ranks, each line with its rank."""
    import threading

    from rich.console import Console

    cluster = _connect(namespace, context)
    size = int(cluster.require_workers()["spec"]["replicas"])
    if rank is not None and rank >= size:
        raise JobError(f"--rank: {rank}, but the job has ranks 0 to {size - 1}")
    console, stop = Console(), threading.Event()

    def show(which: int, line: str) -> None:
        colour = _COLOURS[which % len(_COLOURS)]
        console.print(f"[{colour}]rank {which}[/{colour}] |", end=" ")
        console.print(escaped(line).removeprefix(f"rank {which}: "), markup=False, highlight=False, soft_wrap=True)

    chosen = range(size) if rank is None else [rank]
    if not follow:
        for which in chosen:
            cluster.follow_log(which, tail, False, show, stop)
        return
    lock = threading.Lock()

    def show_whole(which: int, line: str) -> None:
        with lock:
            show(which, line)

    for which in chosen:
        arguments = (which, tail, True, show_whole, stop)
        threading.Thread(target=cluster.follow_log, args=arguments, daemon=True).start()
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        stop.set()


@app.command()
def scale(
    workers: Annotated[int, typer.Argument(metavar="N", min=1, help="The new world size.", show_default=False)],
    namespace: Submitted = "horizonml",
    context: Context = None,
) -> None:
    """Go on with another number of workers, from the newest checkpoint."""
    from dataclasses import replace

    from horizonml.kube.render import for_workers

    cluster = _connect(namespace, context)
    job, settings = cluster.submitted()
    if settings.workers == workers:
        print(f"the job has {count(workers, 'worker')} already")
        return
    try:
        changed = for_workers(job, workers)
    except ValueError as error:
        raise JobError(f"cannot scale to {workers}: {error}") from None
    _apply(cluster, changed, replace(settings, workers=workers))


@app.command()
def delete(
    data: Annotated[bool, typer.Option("--data", help="Delete the workers' disks, too: all checkpoints.")] = False,
    namespace: Submitted = "horizonml",
    context: Context = None,
) -> None:
    """Delete the job from the cluster; checkpoints stay, unless --data."""
    cluster = _connect(namespace, context)
    deleted, kept = cluster.delete(data)
    for name in deleted:
        print(f"deleted {name}")
    if not deleted:
        print(f"nothing of a job in namespace {namespace}")
    if kept:
        print(f"kept: {', '.join(kept)} (checkpoints; --data deletes them)")


def _connect(namespace: str, context: str | None) -> KubeCluster:
    """Return the cluster of a context. Raises ClusterError, MissingPackage."""
    require("kubernetes", "`horizonml cluster`")
    from horizonml.kube.api import KubeCluster

    return KubeCluster(namespace, context)


def _check_quantities(options: dict[str, str | None]) -> None:
    """Raise JobError for what Kubernetes would not take as an amount."""
    import re

    for name, text in options.items():
        if text is not None and not re.fullmatch(r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi)?", text):
            raise JobError(f"{name}: {text!r} is not an amount; write 400m or 2 for cores, 512Mi or 1Gi for memory")


def _apply(cluster: KubeCluster, job: Job, settings: ManifestSettings) -> None:
    """Submit a job, and restart the workers if it has changed. Raises ClusterError."""
    from horizonml.kube.render import render, version
    from horizonml.security.token import make_token

    before = cluster.workers()
    for name in cluster.apply(render(job, settings, make_token())):
        print(f"applied {name}")
    if before is not None and version(before) != version(cluster.require_workers()):
        print("the job has changed: its workers save a checkpoint and start again ...", flush=True)
        cluster.restart()
    workers = count(settings.workers, "worker")
    print(f"{job.name}: {workers}, strategy {job.parallel.strategy}, namespace {settings.namespace}")
    if ":" in job.model.name:
        print(f"note: the workers' image must contain the code of {job.model.name}, and its folder be on PYTHONPATH")


def _wait(cluster: KubeCluster) -> None:
    """Return when all ranks are complete. Raises ClusterError if something stays wrong."""
    import time

    from horizonml.kube.status import Activity, problems

    wrong_since, told = None, ""
    while True:
        rows, conditions = cluster.observe(2.0)
        text = "; ".join(f"rank {entry.rank} {entry.phase}" for entry in rows)
        if all(entry.activity in (Activity.TRAINING, Activity.COMPLETE) for entry in rows):
            lead = rows[0]
            text = f"epoch {lead.epoch}/{lead.epochs}" + (f", loss {lead.loss:.4f}" if lead.loss is not None else "")
        if text != told:
            print(text, flush=True)
            told = text
        if all(entry.activity is Activity.COMPLETE for entry in rows):
            return
        wrong = problems(rows, conditions)
        wrong_since = (wrong_since or time.monotonic()) if wrong else None
        if wrong_since is not None and time.monotonic() - wrong_since > _PATIENCE:
            raise ClusterError("; ".join(wrong))


def _suffix(namespace: str, context: str | None) -> str:
    """Return the options that lead to the same job again."""
    options = [("--namespace", namespace if namespace != "horizonml" else None), ("--context", context)]
    return "".join(f" {name} {value}" for name, value in options if value)
