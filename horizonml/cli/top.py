"""The command that shows a run in the terminal while it trains: `horizonml top`."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.text import Text

    from horizonml.report.live import LiveRun

_PLAIN_WIDTH = 110  # columns without a terminal


def top(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run's folder (runs/NAME), while it trains or afterwards.", show_default=False
        ),
    ],
    once: Annotated[
        bool,
        typer.Option("--once", help="Print one view and end; without a terminal, this is always so."),
    ] = False,
    every: Annotated[
        float, typer.Option(metavar="S", min=0.1, max=3600, help="Refresh the view every S seconds.")
    ] = 1.0,
) -> None:
    """Watch a run in the terminal.

    Shows how far the run is, its loss and speed, each rank's memory and where its time goes, the plan, what flows over
    the links, and what has happened. Everything is read from the run's folder, so the run may be finished, and it is
    never disturbed. Press q or Ctrl-C to leave; the run goes on.
    """
    from rich.console import Console

    from horizonml.errors import HorizonError
    from horizonml.report.live import LiveRun

    if not run.is_dir():
        raise HorizonError(f"{run} is not a folder; name that of a run, such as runs/digits")
    console = Console(highlight=False)
    shown = _Shown(LiveRun(run), console.encoding.lower().startswith("utf"))
    if once or not console.is_terminal:
        width = console.width if console.is_terminal or os.environ.get("COLUMNS", "").isdigit() else _PLAIN_WIDTH
        for line in shown.lines(width, None):
            console.print(line, soft_wrap=True)
        return
    from rich.console import Group
    from rich.live import Live

    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(Group(*shown.lines(console.width, console.height)), refresh=True)
            if pressed(every):
                return


class _Shown:
    """Reads a run and what is known of its plan, again and again."""

    def __init__(self, run: LiveRun, unicode: bool) -> None:
        self._run, self._unicode = run, unicode

    def lines(self, width: int, height: int | None) -> list[Text]:
        """Return the run's present state in so many columns and lines."""
        from horizonml.report.top import ASCII, UNICODE, frame

        self._run.poll()
        return frame(self._run, width, height, UNICODE if self._unicode else ASCII)


class _Pressed:
    """Waits for keys."""

    def __init__(self, reads: bool) -> None:
        self._reads = reads

    def __call__(self, seconds: float) -> bool:
        """Wait so long, or until q or Ctrl-C is pressed, and return whether it was."""
        end = time.monotonic() + seconds
        try:
            while (left := end - time.monotonic()) > 0:
                if not self._reads:
                    time.sleep(left)
                elif select.select([sys.stdin], [], [], left)[0]:
                    key = os.read(sys.stdin.fileno(), 1)
                    if key in (b"q", b"Q", b""):  # nothing, where the terminal is gone
                        return True
        except KeyboardInterrupt:
            return True
        return False


@contextmanager
def _keys() -> Iterator[_Pressed]:
    """Read keys at once and without showing them, where the input is a terminal; restore the terminal afterwards."""
    try:
        import termios
        import tty

        before = termios.tcgetattr(sys.stdin)
    except (ImportError, OSError, ValueError):  # not Unix, or the input is no terminal
        yield _Pressed(False)
        return
    except termios.error:
        yield _Pressed(False)
        return
    try:
        tty.setcbreak(sys.stdin)
        yield _Pressed(True)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
