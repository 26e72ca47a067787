"""The command that breaks things on purpose, and measures what that costs: `python -m benchmarks.chaos`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from horizonml.cli.options import JobFile, Overrides, load_job
from horizonml.machine.code import require
from horizonml.runtime.process import run_and_exit

if TYPE_CHECKING:
    from benchmarks.chaos.campaign import Result, Settings

_ENDLESS = ("epochs=1000000", "steps=null", "early_stop.patience=null")  # what a campaign changes in a job


def chaos(
    job_file: JobFile,
    faults: Annotated[
        str, typer.Option(metavar="KIND,...", help="The faults to inject, separated by commas.")
    ] = "kill,pause,partition,oom,disk",
    every: Annotated[str, typer.Option(metavar="TIME", help="Time from one fault to the next, such as 30s.")] = "30s",
    length: Annotated[
        str, typer.Option("--for", metavar="TIME", help="For how long faults are injected, such as 10m.")
    ] = "10m",
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", metavar="N", min=2, help="World size. Default: the job's.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed does the same faults to the same ranks.")] = 0,
    restart_after: Annotated[
        str, typer.Option(metavar="TIME", help="Time after which a rank that died is started again.")
    ] = "1s",
    deadline: Annotated[
        str, typer.Option(metavar="TIME", help="Time after a fault by which all ranks must step again.")
    ] = "2m",
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How long the job runs without faults before and after. Default: a tenth of --for, but 5s to 60s.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for records, logs, numbers and the picture. Default: runs/chaos."),
    ] = None,
) -> None:
    """Break a job on purpose, and measure what that costs.

    The job is trained on this machine, while its ranks are killed, paused, cut off, and left without memory or disk. A
    rank that dies is started again. This does a kill or a pause every ten seconds for a minute:

    \b
        python -m benchmarks.chaos digits --faults kill,pause --every 10s --for 1m --ranks 3

    The result is the goodput, which is the share of the samples that the same ranks train without faults in the same
    time, and how fast each fault was noticed and overcome. The exit code is 1 if a rank hangs, does not step again by
    the deadline, or prints a traceback.

    \b
    Faults (* Linux only):
    kill        the process ends at once (SIGKILL)
    pause       the process is stopped for 1 to 10 s (SIGSTOP); a rank counts as
                lost after 4 s
    partition*  the network is cut for 1 to 10 s, and no connection is closed;
                this needs root or user namespaces
    oom*        the process gets no further memory, so an allocation fails soon
    disk*       writing to files fails for 4 to 10 s
    """
    require("matplotlib", "`benchmarks.chaos`")
    settings = _settings(
        job_file, faults, every, length, ranks, seed, restart_after, deadline, reference, overrides, out
    )
    result = _run(settings)
    _show(result)
    if result.failures:
        raise typer.Exit(1)


def _settings(
    job_file: Path,
    faults: str,
    every: str,
    length: str,
    ranks: int | None,
    seed: int,
    restart_after: str,
    deadline: str,
    reference: str | None,
    overrides: list[str] | None,
    out: Path | None,
) -> Settings:
    """Return what the options ask for. Raises JobError."""
    from benchmarks.chaos.campaign import Settings
    from horizonml.errors import JobError
    from horizonml.spec.base import duration

    interval, seconds = duration(every, "--every"), duration(length, "--for")
    if interval > seconds:
        raise JobError(f"--every: {every} is longer than --for {length}, so there would be no fault")
    job = load_job(job_file, overrides, ranks)
    world_size = job.parallel.world_size()
    if world_size < 2:
        raise JobError("the job trains on one rank, and nobody could go on without it; say --ranks 3")
    return Settings(
        job=job_file,
        ranks=world_size,
        folder=_free(out),
        faults=_kinds(faults),
        every=interval,
        length=seconds,
        reference=duration(reference, "--reference") if reference else min(60.0, max(5.0, seconds / 10)),
        seed=seed,
        restart_after=duration(restart_after, "--restart-after", -1.0),
        deadline=duration(deadline, "--deadline"),
        options=tuple(word for one in [*(overrides or []), *_ENDLESS] for word in ("--set", one)),
    )


def _kinds(text: str) -> tuple[str, ...]:
    """Return the kinds of faults that an option names, without those that this machine cannot do. Raises JobError."""
    from benchmarks.chaos.faults import FAULTS
    from horizonml.errors import JobError
    from horizonml.text import nearest

    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in FAULTS:
            raise JobError(f"--faults: {name!r} is not one of {', '.join(FAULTS)}{nearest(name, FAULTS)}")
    problems = {name: problem for name in names if (problem := FAULTS[name].problem()) is not None}
    if not names:
        raise JobError(f"--faults: name at least one of {', '.join(FAULTS)}")
    if len(problems) == len(names):
        raise JobError("; ".join(f"--faults: {name}: {problem}" for name, problem in problems.items()))
    for name, problem in problems.items():
        print(f"{name} is left out: {problem}", file=sys.stderr, flush=True)
    return tuple(name for name in names if name not in problems)


def _free(out: Path | None) -> Path:
    """Return the folder to write to, which must not hold a campaign yet. Raises JobError."""
    from horizonml.errors import JobError

    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise JobError(f"--out: {out} is there already; choose another folder, or delete it")
        return out
    numbers = (Path("runs/chaos" if not number else f"runs/chaos-{number + 1}") for number in range(10_000))
    return next(path for path in numbers if not path.exists())


def _run(settings: Settings) -> Result:
    """Run the campaign, and show how far it is. Raises Exit if the user interrupts it."""
    from benchmarks.chaos.campaign import Campaign, Interrupted
    from benchmarks.chaos.display import display
    from benchmarks.chaos.report import briefly
    from horizonml.machine.signals import StopRequest, handling
    from horizonml.text import count

    stop, shown = StopRequest(), display()
    shown.say(
        f"{count(settings.ranks, 'rank')} of {settings.job}: {', '.join(settings.faults)}, one fault every "
        f"{briefly(settings.every)} for {briefly(settings.length)} (seed {settings.seed})"
    )
    try:
        with handling(stop.note):
            return Campaign(settings, shown, lambda: stop.wanted).run()
    except Interrupted:
        shown.close()
        print(f"interrupted: all ranks have ended; records and logs are in {settings.folder}", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        shown.close()


def _show(result: Result) -> None:
    """Print what came out, and write it down."""
    from benchmarks.chaos import report
    from benchmarks.chaos.picture import draw
    from horizonml.cli.tables import print_table

    if result.faults:
        print()
        print_table(
            "Time until a fault was noticed and overcome: median, and worst in brackets",
            report.KINDS_HEADER,
            report.kinds_table(result),
        )
        print()
        print_table("", ("whole run", "measured"), report.facts(result), (0, 1))
        print()
        for path in [*report.write(result), draw(result, result.settings.folder / "chaos.png")]:
            print(path, flush=True)
    for failure in result.failures:
        print(f"error: {failure}", file=sys.stderr)


def main() -> None:
    """Run the command as `horizonml` runs its own: errors that are meant for the user have no traceback."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command()(chaos)
    run_and_exit(lambda: app(prog_name="python -m benchmarks.chaos"))


if __name__ == "__main__":
    main()
