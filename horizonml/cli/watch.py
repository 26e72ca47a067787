"""The command that serves a page for a run: `horizonml watch`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from horizonml.errors import JobError, SecurityError

if TYPE_CHECKING:
    from horizonml.security.token import Token


def watch(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run's folder (runs/NAME), or a folder of runs, for the newest.", show_default=False
        ),
    ],
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; all but 127.0.0.1 need --insecure.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 for any free one.")] = 8400,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in this machine's browser.")] = False,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Let everyone who reaches the address read the page, which is not encrypted."),
    ] = False,
) -> None:
    """Serve a page about a run, live or finished.

    The page shows devices and links, the plan, where the time goes, the loss, what has happened, and what another
    device or link would change. It loads nothing from elsewhere, and ends with Ctrl-C.
    """
    from horizonml.machine.network import is_loopback
    from horizonml.machine.signals import stop_on_signal
    from horizonml.page.server import PageServer
    from horizonml.page.stopping import StopHere

    folder = find_run(run)
    if not is_loopback(host) and not insecure:
        raise JobError(
            f"--host {host}: everyone on that network could read the page, and what travels is not encrypted. From "
            f"another machine, use `ssh -L {port}:127.0.0.1:{port} THIS-MACHINE` and open http://127.0.0.1:{port}; or "
            "add --insecure if everyone there may read it"
        )
    token, stop_run = _token(), StopHere(folder)
    page = PageServer(folder, (host, port), token, {"stop": stop_run}, possible=lambda name: stop_run.is_possible())
    with stop_on_signal() as stop, page as server:
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{server.port}/"
        print(f"the page of {folder} is at {url} (Ctrl-C ends it)", flush=True)
        if not is_loopback(host):
            print("everyone who reaches this address can read it", flush=True)
        if open_page:
            import webbrowser

            webbrowser.open(url)
        while not stop.wanted:
            threading.Event().wait(0.2)


def _token() -> Token | None:
    """Return the token of this machine's user, with which the page offers to stop a run, or None."""
    from horizonml.security.token import find_token

    try:
        return find_token()
    except SecurityError as error:
        print(f"the page is read-only: {error}", file=sys.stderr)
    return None


def find_run(path: Path) -> Path:
    """Return a run's folder, or the newest run in a folder of several. Raises JobError."""
    if not path.is_dir():
        raise JobError(f"{path} is not a folder; name that of a run, such as runs/digits")
    if _is_run(path):
        return path
    runs = [inner for inner in path.iterdir() if inner.is_dir() and _is_run(inner)]
    if not runs:
        raise JobError(f"{path} is not a run and contains none; runs are in `runs`, or where the job's `folder` says")
    return max(runs, key=_newest)


def _is_run(path: Path) -> bool:
    return (path / ".horizonml-run").exists() or any(path.glob("rank-*.jsonl"))


def _newest(path: Path) -> float:
    return max((file.stat().st_mtime for file in path.glob("rank-*.jsonl")), default=path.stat().st_mtime)
