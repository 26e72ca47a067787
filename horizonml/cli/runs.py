"""The commands about the runs of this device and those near it: `horizonml ls`, `stop` and `logs`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from horizonml.errors import HorizonError, JobError
from horizonml.text import count, percent, plain_lines, printable, rough_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from horizonml.rendezvous.device_messages import JobOffer
    from horizonml.rendezvous.discovery.records import FoundService
    from horizonml.report.runs import RunSummary

_RUNS = Path("runs")
_NEAR_SECONDS = 1.5  # in which devices on the network answer
_STOP_SECONDS = 90.0  # in which ranks that were asked to stop have ended
_LOOK_SECONDS = 0.3

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="A run's folder (runs/NAME), or a folder of runs, for the newest.", show_default=False
    ),
]


def find_run(path: Path) -> Path:
    """Return a run's folder, or the newest run in a folder of several. Raises JobError."""
    if not path.is_dir():
        raise JobError(f"{path} is not a folder; name that of a run, such as runs/digits")
    from horizonml.report.runs import is_run, runs_in

    if is_run(path):
        return path
    found = runs_in(path)
    if not found:
        raise JobError(f"{path} is not a run and contains none; runs are in `runs`, or where the job's `folder` says")
    return found[0]


def ls(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="The folder of this device's runs.")] = _RUNS,
    here: Annotated[bool, typer.Option("--here", help="Do not look for runs of other devices.")] = False,
) -> None:
    """List the runs of this device, and those that devices near it train.

    A run near this device is one that `horizonml up` announces on the network, and that has this device's token:
    `horizonml join` takes part in it.
    """
    from horizonml.cli.tables import print_table
    from horizonml.report.runs import Runs
    from horizonml.runtime.lobby.offer import is_known

    if folder != _RUNS and not folder.is_dir():
        raise JobError(f"{folder} is not a folder; name one that holds runs, such as `runs`")
    found, near = Runs(folder).poll(), [] if here else list(_near())
    rows, known = list[list[str]](), set[str]()
    for one in found:
        offered = next((offer for _, offer in near if is_known(Path(one.folder), offer.lineage)), None)
        if offered is None or one.loss is not None:  # else those of rank 0 are on another device, which says more
            rows.append(_row(one))
            known |= {offered.lineage} if offered is not None else set()
    rows += [_row_near(service, offered) for service, offered in near if offered.lineage not in known]
    if rows:
        print_table("", ["run", "state", "step", "accuracy", "devices", "since"], rows, text=(0, 1))
    else:
        print(f"no run is in {folder}, and no device near this one trains; `horizonml train digits` begins a run")


def _row(one: RunSummary) -> list[str]:
    """Return a row about a run of this device."""
    ranks = f" ({count(one.ranks, 'rank')})" if one.ranks != one.devices else ""
    steps = f"{one.step:,}" + (f" of {one.steps:,}" if one.steps else "")
    return [one.folder, one.state, steps, percent(one.accuracy, 1), f"{one.devices}{ranks}", rough_time(one.seconds)]


def _near() -> Iterator[tuple[FoundService, JobOffer]]:
    """Yield the runs that others announce and that this device could join, with what their devices say of them."""
    from horizonml.rendezvous.discovery.finding import Prover, fits
    from horizonml.rendezvous.discovery.service import browse
    from horizonml.runtime.command import insecure
    from horizonml.security.token import find_token

    token = find_token()
    if token is None and not insecure():
        return
    token_id, prover = token.id if token is not None else "", Prover(token)
    found = [one for one in browse(_NEAR_SECONDS) if fits(one, token_id)]
    for service in prover.prove(found, lambda: False) if found else ():
        yield service, prover.offers[service.host, service.port]


def _row_near(service: FoundService, offered: JobOffer) -> list[str]:
    from horizonml.rendezvous.device_messages import Phase
    from horizonml.report.live_facts import RunState

    told = offered.progress
    return [
        printable(f"{offered.name} on {service.name} ({service.host}:{service.port})", 120),
        RunState.RUNNING if offered.phase is Phase.STARTED else RunState.WAITING,
        f"{told.step:,}" if told.step is not None else "-",
        percent(told.accuracy, 1),
        str(offered.devices),
        rough_time(told.seconds) if told.seconds is not None else "-",
    ]


def stop(
    run: Run,
    wait: Annotated[bool, typer.Option(help="Wait until the run has stopped.")] = True,
) -> None:
    """Stop a run whose ranks are processes of this machine, as Ctrl-C does where it was started.

    The ranks finish their step and save a checkpoint, and the same command goes on from there. Of a run that this
    device has joined, only its own part stops.
    """
    from horizonml.report.live import LiveRun
    from horizonml.report.page.server import stop_here
    from horizonml.telemetry.lifeline import living_ranks

    folder = find_run(run)
    print(stop_here(folder), flush=True)
    deadline = time.monotonic() + _STOP_SECONDS
    while wait and living_ranks(folder) is not None:
        if time.monotonic() > deadline:
            raise HorizonError(f"{folder} has not stopped within {_STOP_SECONDS:.0f} s; its ranks are still there")
        time.sleep(_LOOK_SECONDS)
    if wait:
        found = LiveRun(folder)
        found.poll()
        print(f"{folder} has stopped after step {found.step:,}")


def logs(
    run: Run,
    rank: Annotated[
        int | None, typer.Argument(metavar="[RANK]", min=0, help="Only this rank's.", show_default=False)
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", min=1, help="The last N lines of each.")] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is added, until the run is over or Ctrl-C.")
    ] = False,
) -> None:
    """Print what the ranks of a run have said.

    Ranks that `horizonml train --workers N` starts keep logs in the run's folder: warnings and errors of all of them,
    and whatever else the ranks other than 0 print.
    """
    from horizonml.runtime.local import RankLog
    from horizonml.telemetry.lifeline import living_ranks

    folder = find_run(run)
    paths = {int(path.stem.partition("-")[2]): path for path in folder.glob("rank-*.log")}
    if rank is not None:
        paths = {number: path for number, path in paths.items() if number == rank}
    if not paths:
        whose = f"of rank {rank}" if rank is not None else "of any rank"
        raise JobError(
            f"{folder} has no log {whose}; the output of `horizonml up` and `join`, and of ranks that containers run, "
            "is where they were started"
        )
    followed = {number: RankLog(path) for number, path in sorted(paths.items())}
    for number, path in sorted(paths.items()):
        text = plain_lines(path.read_text(errors="replace")).strip()
        for line in text.split("\n")[-lines:] if text else ():
            print(_of_rank(number, line, len(paths)))
    goes_on = follow
    while goes_on:
        goes_on = living_ranks(folder) is not None  # before the last look
        for number, log in followed.items():
            for line in log.new_lines():
                print(_of_rank(number, line, len(paths)), flush=True)
        time.sleep(_LOOK_SECONDS)


def _of_rank(number: int, line: str, logs: int) -> str:
    return line if logs == 1 or line.startswith("rank ") else f"rank {number}: {line}"
