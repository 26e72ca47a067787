"""The commands about jobs in Kubernetes, `horizonml cluster`, and the table that shows a job's ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from horizonml.cli.options import JobFile, Overrides, Workers, load_job
from horizonml.cli.tables import layout, print_text, terminal_width
from horizonml.errors import ClusterError, JobError
from horizonml.machine.code import require
from horizonml.text import count, escaped

if TYPE_CHECKING:
    from horizonml.job.schema import Job
    from horizonml.kube.api import KubeCluster
    from horizonml.kube.render import ManifestSettings
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
    help="Run jobs in a Kubernetes cluster, any number of them in one namespace.\n\n"
    "Start with: horizonml cluster submit digits --workers 5",
    no_args_is_help=True,
)

Namespace = Annotated[
    str, typer.Option("--namespace", metavar="NAME", help="The job's namespace; it is made if it is not there.")
]
Submitted = Annotated[str, typer.Option("--namespace", metavar="NAME", help="The job's namespace.")]
Context = Annotated[str | None, typer.Option(metavar="NAME", help="Context of the kubeconfig.", show_default=False)]
Name = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]", help="The job's name; it may be left out where there is one job.", show_default=False
    ),
]
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
_LOOK_SECONDS = 5.0  # between two looks at which pods there are
_PATIENCE = 60.0  # seconds for which `submit --wait` watches a problem before it gives up


@app.command()
def submit(
    job_file: JobFile,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name in the cluster. Default: the job's.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    workers: Workers = None,
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            metavar="NAME=COUNT[,KEY=VALUE...]",
            help="Instead of --workers, --cpu and --memory: a class of workers that are alike (repeatable). Keys: cpu "
            "(`node` is all that a node has), memory, arch, accelerator, and labels that its nodes have. For example: "
            "--class pc=2,cpu=8 --class pi=3,cpu=4,arch=arm64",
        ),
    ] = None,
    image: Annotated[str | None, typer.Option(metavar="NAME", help="Image of the workers.", show_default=False)] = None,
    cpu: Annotated[
        str | None,
        typer.Option(
            metavar="AMOUNT", help="Cores of each worker: 400m, 4, or node for all of its node's.", show_default=False
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="AMOUNT", help="Memory of each worker, e.g. 1Gi.", show_default=False)
    ] = None,
    disk: Annotated[
        str | None, typer.Option(metavar="AMOUNT", help="Size of each worker's disk. Default: 2Gi.", show_default=False)
    ] = None,
    storage_class: Annotated[
        str | None, typer.Option(metavar="NAME", help="Storage class of the workers' disks.", show_default=False)
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Submit it as an Indexed Job to this queue of Kueue, which starts it when there is room.",
            show_default=False,
        ),
    ] = None,
    ttl: Annotated[
        int | None,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="After which a finished job gives back its memory; its checkpoints stay. Default: it stays, to be "
            "looked at.",
            show_default=False,
        ),
    ] = None,
    as_job: Annotated[bool, typer.Option("--job", help="Submit it as an Indexed Job, which ends.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Change the job of this name if there is one: it goes on where it can.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the objects as YAML, without a token, and connect to nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job is complete.")] = False,
    namespace: Namespace = "horizonml",
    context: Context = None,
) -> None:
    """Start a job in the cluster.

    Modules beside the job file that it names (`model.name: my_model:Net`) go with it. If a job of this name is there
    already, you are told what differs. With --replace, its workers save a checkpoint and start again with the new job,
    from that checkpoint where the job allows it. Other jobs are never touched.
    """
    from horizonml.job.jobfile import ready_jobs
    from horizonml.kube.render import NODE, ManifestSettings, WorkerClass, check_amount, files_of, job_name, render

    if classes and (workers or cpu or memory):
        raise JobError(
            "--class: it states how many workers there are and what each has; leave out --workers, --cpu and --memory"
        )
    found = tuple(map(WorkerClass.parse, classes or ()))
    if len({one.name for one in found}) < len(found):
        raise JobError("--class: two classes have the same name; give each its own")
    number = sum(one.count for one in found) or workers
    job = load_job(job_file, overrides, number)
    for option, amount in (("--cpu", None if cpu == NODE else cpu), ("--memory", memory), ("--disk", disk)):
        check_amount(option, amount)
    settings = ManifestSettings(
        namespace,
        job_name(job.name if name is None else name),
        found or (WorkerClass(count=job.parallel.world_size(), cpu=cpu, memory=memory),),
        image,
        disk,
        storage_class,
        "job" if as_job or queue else "statefulset",
        queue,
        ttl,
    )
    files = files_of(job, ready_jobs().get(str(job_file), job_file).parent)
    if dry_run:
        import yaml

        print(yaml.safe_dump_all(render(job, settings, files=files), sort_keys=False), end="")
        return
    cluster = _connect(namespace, context)
    _submit(cluster, job, settings, files, replace)
    print(f"\nwatch it: horizonml cluster top {settings.name}{_suffix(namespace, context)}")
    if wait:
        _wait(cluster, settings.name)


@app.command("list")
def list_jobs(namespace: Submitted = "horizonml", context: Context = None) -> None:
    """Show the jobs of a namespace, and how far they are."""
    cluster = _connect(namespace, context)
    from horizonml.kube.status import job_row

    rows = [job_row(name, workers) for name, workers in cluster.jobs()]
    if not rows:
        print(f"no jobs in namespace {namespace}")
        return
    print(layout(("name", "workers", "ready", "progress"), rows, text=(0, 3), width=terminal_width()))


@app.command()
def status(
    name: Name = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    namespace: Submitted = "horizonml",
    context: Context = None,
) -> None:
    """Show where every rank runs, how fast, and what is wrong; the exit code is 1 if something is."""
    import json

    cluster = _connect(namespace, context)
    job = cluster.chosen(name)
    rows, progress, wrong, lines = _observe(cluster, job, 1.0)
    if as_json:
        ranks = [entry.to_json() for entry in rows]
        print(json.dumps({"job": job, "progress": progress, "ranks": ranks, "problems": wrong}, indent=2))
    else:
        for line in lines:
            (print if "\n" in line else print_text)(line)  # the table fits already
    if wrong:
        raise typer.Exit(1)


def _observe(cluster: KubeCluster, job: str, pause: float) -> tuple[list[RankStatus], str | None, list[str], list[str]]:
    """Watch a job for `pause` seconds; return its ranks, progress and problems, and all of it as lines for people."""
    from horizonml.kube.status import problems, progress_of

    rows, conditions = cluster.observe(job, pause)
    workers = cluster.workers(job)
    wrong, progress = problems(rows, conditions), progress_of(workers)
    if not workers:
        wrong.append(f"the workers of {job} are not there; submit it again, or delete the rest of it")
    head = f"{job}: {progress or 'no progress yet'}{'' if rows else '; it has no workers'}"
    lines = [head, rank_table(rows, terminal_width()), *(f"problem: {one}" for one in wrong)]
    if cluster.reader.refused:
        lines.append(f"note: what the workers measure may not be read: {cluster.reader.refused}")
    return rows, progress, wrong, lines


@app.command()
def top(name: Name = None, namespace: Submitted = "horizonml", context: Context = None) -> None:
    """Show the same as `status`, live; Ctrl-C ends it."""
    if not sys.stdout.isatty():
        status(name, False, namespace, context)
        return
    from rich.live import Live
    from rich.text import Text

    cluster = _connect(namespace, context)
    job = cluster.chosen(name)
    with suppress(KeyboardInterrupt), Live(refresh_per_second=4) as live:
        while True:
            live.update(Text("\n".join(_observe(cluster, job, 2.0)[3])))


@app.command()
def logs(
    name: Name = None,
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
    job = cluster.chosen(name)
    pods = cluster.by_rank(job)
    if rank is not None and rank not in pods:
        raise JobError(f"--rank: {rank}, but job {job} has the ranks {', '.join(map(str, pods)) or 'that come later'}")
    console, stop, lock = Console(), threading.Event(), threading.Lock()

    def show(which: int, line: str) -> None:
        colour = _COLOURS[which % len(_COLOURS)]
        with lock:
            console.print(f"[{colour}]rank {which}[/{colour}] |", end=" ")
            console.print(escaped(line).removeprefix(f"rank {which}: "), markup=False, highlight=False, soft_wrap=True)

    followed, shown = set[int](), True
    try:
        while True:
            for which in sorted(pods.keys() - followed if rank is None else {rank} - followed):
                followed.add(which)
                arguments = (which, pods, tail, follow, show, stop)
                if follow:
                    threading.Thread(target=cluster.reader.follow_log, args=arguments, daemon=True).start()
                else:
                    shown &= cluster.reader.follow_log(*arguments)
            if not follow:
                break
            stop.wait(_LOOK_SECONDS)
            with suppress(ClusterError):  # a pod may have taken another's place, or have come
                pods |= cluster.by_rank(job)
    except KeyboardInterrupt:
        stop.set()
    if not shown:
        raise typer.Exit(1)


@app.command()
def scale(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The job's name.", show_default=False)],
    workers: Annotated[int, typer.Argument(metavar="N", min=1, help="The new number of workers.", show_default=False)],
    of_class: Annotated[
        str | None, typer.Option("--class", metavar="NAME", help="Of this class of workers.", show_default=False)
    ] = None,
    namespace: Submitted = "horizonml",
    context: Context = None,
) -> None:
    """Change the number of workers while they train; no step is repeated."""
    cluster = _connect(namespace, context)
    from horizonml.kube.render import CLASS, for_workers
    from horizonml.kube.status import size_of

    job = cluster.chosen(name)
    found = {str(one["metadata"]["labels"][CLASS]): one for one in cluster.workers(job)}
    if of_class is None and len(found) > 1:
        raise JobError(f"job {job} has several classes of workers; choose one with --class: {', '.join(found)}")
    if not found:
        raise JobError(f"job {job} has no workers; delete it (its checkpoints stay), and submit it again")
    chosen = of_class or next(iter(found))
    if chosen not in found:
        raise JobError(f"--class: job {job} has no class {chosen!r}, only {', '.join(found)}")
    counts = {key: size_of(one) for key, one in found.items()}
    if counts[chosen] == workers:
        print(f"job {job} has {count(workers, 'worker')} already")
        return
    try:
        for_workers(cluster.job(job), sum(counts.values()) - counts[chosen] + workers)
    except JobError as error:
        raise JobError(f"cannot scale to {workers}: {error}") from None
    cluster.scale(job, chosen, workers)
    print(f"{job}: {count(counts[chosen], 'worker')} become {workers}, while they train")


@app.command()
def delete(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The job's name.", show_default=False)],
    data: Annotated[bool, typer.Option("--data", help="Delete the workers' disks, too: all checkpoints.")] = False,
    namespace: Submitted = "horizonml",
    context: Context = None,
) -> None:
    """Delete a job from the cluster; checkpoints stay, unless --data."""
    cluster = _connect(namespace, context)
    from horizonml.kube.render import job_name

    deleted, kept = cluster.delete(job_name(name), data)
    for entry in deleted:
        print(f"deleted {entry}")
    if not deleted and not kept:
        raise ClusterError(f"nothing of a job {name} in namespace {namespace}; see horizonml cluster list")
    if kept:
        print(f"kept: {', '.join(kept)} (checkpoints; --data deletes them)")


def _connect(namespace: str, context: str | None) -> KubeCluster:
    """Return the cluster of a context. Raises ClusterError, MissingPackage."""
    require("kubernetes", "`horizonml cluster`")
    from horizonml.kube.api import KubeCluster

    return KubeCluster(namespace, context)


def _submit(
    cluster: KubeCluster, job: Job, settings: ManifestSettings, files: Mapping[str, str], replace: bool
) -> None:
    """Submit a job, or change the one of its name. Raises ClusterError."""
    from horizonml.job.jobfile import places
    from horizonml.kube.render import code_outside, differences, has_moved, is_another_kind, render
    from horizonml.security.token import make_token

    name, before = settings.name, cluster.submitted(settings.name)
    if before is not None and before[0] == files and not cluster.workers(name):
        before = None  # what an earlier attempt has begun is completed
    changes = differences(before[0], cluster.live(name, before[1]), files, settings) if before is not None else []
    if before is not None and not changes:
        print(f"job {name} is there already, and nothing differs")
        return
    if before is not None and not replace:
        raise JobError(
            f"job {name} is there already, and differs: {'; '.join(changes)}. Change it with --replace, or give the "
            "new one another --name"
        )
    documents = render(job, settings, make_token(), files)
    cluster.apply(documents, force=before is not None, rehearse=True)  # nothing is stopped for what would be refused
    remade = before is not None and is_another_kind(before[1], settings)
    if before is not None and remade:
        # Kubernetes changes neither the disks of a StatefulSet nor the template of a Job.
        cluster.keep_disks(name, before[1], settings)
        print(f"job {name} saves a checkpoint and is made anew ...", flush=True)
        cluster.remake(name)
    for entry in cluster.apply(documents, force=before is not None):
        print(f"applied {entry}")
    if before is not None and not remade and (before[0] != files or has_moved(before[1], settings)):
        print("the job or its ranks have changed: its workers save a checkpoint and start again ...", flush=True)
        cluster.restart(name)
    cluster.forget_files(name, documents)
    workers = count(settings.workers, "worker")
    print(f"{name}: {workers}, strategy {job.parallel.strategy}, namespace {settings.namespace}")
    for place in places(job):
        if not place.is_url:
            print(f"note: {place.field}: {place.text} must be in the workers' image, or on a volume that they mount")
    for field in code_outside(job, files):
        print(f"note: the workers' image must contain the code of {field}, and its folder be on PYTHONPATH")


def _wait(cluster: KubeCluster, name: str) -> None:
    """Return when all ranks are complete. Raises ClusterError if something stays wrong."""
    import time

    from horizonml.kube.status import Activity, problems

    wrong_since, told = None, ""
    while True:
        rows, conditions = cluster.observe(name, 2.0)
        if not rows:
            return  # they are given back already
        text = "; ".join(f"rank {entry.rank} {entry.phase}" for entry in rows)
        if all(entry.activity in (Activity.TRAINING, Activity.COMPLETE) for entry in rows):
            lead = rows[0]
            text = f"epoch {lead.epoch}/{lead.epochs}" if lead.epoch is not None else lead.phase
            text += f", loss {lead.loss:.4f}" if lead.loss is not None else ""
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
