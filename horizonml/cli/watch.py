"""The commands that show runs: `horizonml watch` (a page, or a view in the terminal) and `horizonml report`."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from horizonml.cli.runs import find_run
from horizonml.errors import HorizonError, JobError, SecurityError
from horizonml.machine.code import require

if TYPE_CHECKING:
    from rich.text import Text

    from horizonml.security.token import Token

_PLAIN_WIDTH = 110  # columns without a terminal


_Once = Annotated[
    bool, typer.Option("--once", help="Print one view in the terminal, and end; without a terminal, this is always so.")
]
_Every = Annotated[
    float, typer.Option(metavar="S", min=0.1, max=3600, help="Refresh the view in the terminal every S seconds.")
]
_TensorBoard = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Write no page, but TensorBoard event files to FOLDER/NAME, which must not contain any yet.",
        show_default=False,
    ),
]
_MLflow = Annotated[
    str | None,
    typer.Option(
        metavar="URI",
        help="Write no page, but log to MLflow: the URI of a server, or a folder for a database. If part of the run "
        "was logged there before, the rest is added.",
        show_default=False,
    ),
]


def _watch_in_terminal(run: Path, once: bool, every: float) -> None:
    """Show a run in the terminal until q or Ctrl-C is pressed, or `once`; the run goes on."""
    from rich.console import Console

    from horizonml.report.live import LiveRun
    from horizonml.report.top import ASCII, UNICODE, frame

    console, shown = Console(highlight=False), LiveRun(run)
    signs = UNICODE if console.encoding.lower().startswith("utf") else ASCII

    def lines(width: int, height: int | None) -> list[Text]:
        shown.poll()
        return frame(shown, width, height, signs)

    if once or not console.is_terminal:
        width = console.width if console.is_terminal or os.environ.get("COLUMNS", "").isdigit() else _PLAIN_WIDTH
        for line in lines(width, None):
            console.print(line, soft_wrap=True)
        return
    from rich.console import Group
    from rich.live import Live

    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(Group(*lines(console.width, console.height)), refresh=True)
            if pressed(every):
                return


def _pressed(reads: bool, seconds: float) -> bool:
    """Wait so long, or until q or Ctrl-C is pressed if keys can be read, and return whether it was."""
    end = time.monotonic() + seconds
    try:
        while (left := end - time.monotonic()) > 0:
            if not reads:
                time.sleep(left)
            elif select.select([sys.stdin], [], [], left)[0]:
                key = os.read(sys.stdin.fileno(), 1)
                if key in (b"q", b"Q", b""):  # nothing, where the terminal is gone
                    return True
    except KeyboardInterrupt:
        return True
    return False


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Read keys at once and without showing them, where the input is a terminal; restore the terminal afterwards.

    What this yields waits for them; see `_pressed`.
    """
    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, OSError, ValueError):  # the input is no terminal
        yield partial(_pressed, False)
        return
    try:
        tty.setcbreak(sys.stdin)
        yield partial(_pressed, True)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def watch(
    run: Annotated[
        Path,
        typer.Argument(metavar="[RUN]", help="A run's folder (runs/NAME), or a folder of runs, for a page of all."),
    ] = Path("runs"),
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; all but 127.0.0.1 need --insecure.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 for any free one.")] = 8400,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in this machine's browser.")] = False,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Let everyone who reaches the address read the page, which is not encrypted."),
    ] = False,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Show the run in this terminal instead; q or Ctrl-C leaves the view.")
    ] = False,
    once: _Once = False,
    every: _Every = 1.0,
) -> None:
    """Serve a page about a run, live or finished, or show it in the terminal.

    The page shows devices and links, the plan, where the time goes, the loss, what has happened, and what another
    device or link would change. The page of all runs compares their curves, and leads to the page of each. Pages load
    nothing from elsewhere, and end with Ctrl-C. Everything is read from the folders of runs, which are never disturbed.
    """
    if terminal or once:
        _watch_in_terminal(find_run(run), once, every)
        return
    from horizonml.machine.network import is_loopback
    from horizonml.machine.signals import stop_on_signal
    from horizonml.report.page.runs import RunsServer
    from horizonml.report.page.server import PageServer, stop_here
    from horizonml.report.runs import is_run
    from horizonml.telemetry.lifeline import living_ranks

    if not run.is_dir():
        raise JobError(f"{run} is not a folder; name that of a run, such as runs/digits, or of runs")
    if not is_loopback(host) and not insecure:
        raise JobError(
            f"--host {host}: everyone on that network could read the page, and what travels is not encrypted. From "
            f"another machine, use `ssh -L {port}:127.0.0.1:{port} THIS-MACHINE` and open http://127.0.0.1:{port}; or "
            "add --insecure if everyone there may read it"
        )
    page: PageServer | RunsServer
    if is_run(run):
        actions = {"stop": partial(stop_here, run)}
        page = PageServer(run, (host, port), _token(), actions, possible=lambda name: living_ranks(run) is not None)
    else:
        page = RunsServer(run, (host, port))
    with stop_on_signal() as stop, page as server:
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{server.port}/"
        print(f"the page of {run} is at {url} (Ctrl-C ends it)", flush=True)
        if not is_loopback(host):
            print("everyone who reaches this address can read it", flush=True)
        if open_page:
            import webbrowser

            webbrowser.open(url)
        while not stop.wanted:
            time.sleep(0.2)


def _token() -> Token | None:
    """Return the token of this machine's user, with which the page offers to stop a run, or None."""
    from horizonml.security.token import find_token

    try:
        return find_token()
    except SecurityError as error:
        print(f"the page is read-only: {error}", file=sys.stderr)
    return None


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
    tensorboard: _TensorBoard = None,
    mlflow: _MLflow = None,
) -> None:
    """Write a page about runs and benches.

    The page has findings in words, tables, and pictures of where the time went. It is one HTML file; its pictures, and
    the numbers as CSV and JSON, are written beside the records.

    A job with telemetry.tensorboard or telemetry.mlflow logs while it trains. Use --tensorboard and --mlflow for a run
    that did not, or to add what could not be delivered then. The run's own records are not changed.
    """
    if tensorboard is not None or mlflow is not None:
        _log(folder, tensorboard, mlflow)
        return
    require("matplotlib", "`horizonml report`")
    from horizonml.report.bench.report import write_report

    for path in write_report(folder, page):
        print(path)


def _log(run: Path, tensorboard: Path | None, mlflow: str | None) -> None:
    """Log a recorded run to TensorBoard or MLflow."""
    from horizonml.report.records import lead_records
    from horizonml.telemetry.sinks import Scalars, Sink, open_mlflow, open_tensorboard

    records, sinks = lead_records(run), list[tuple[str, Sink]]()
    steps = sum(record.kind == "step" for record in records)
    if not steps:
        raise HorizonError(f"{run} has no steps of a run (rank-*.jsonl)")
    if tensorboard is not None:
        folder = tensorboard / run.absolute().name
        if any(folder.glob("events.out.tfevents.*")):
            raise JobError(f"--tensorboard: {folder} has event files already; delete them, or name another folder")
        sinks.append((f"TensorBoard: tensorboard --logdir {tensorboard}", open_tensorboard(folder)))
    try:
        if mlflow is not None:
            sinks.append((f"MLflow at {mlflow}", open_mlflow(mlflow, run)))
        for words, sink in sinks:
            shows = Scalars(sink)
            shows.write(records)
            shows.close()
            print(f"logged {steps:,} steps to {words}")
    except HorizonError:
        raise
    except Exception as error:  # the libraries' own errors are of many kinds
        problem = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HorizonError(f"{run} cannot be logged: {problem}") from error
