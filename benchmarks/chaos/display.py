"""Shows a campaign while it runs: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.chaos.report import briefly


class Lines:
    """Prints plain lines."""

    def part(self, name: str, seconds: float) -> None:
        """Tell that a part begins."""
        self.say(f"{name} ({briefly(seconds)})" if seconds else name)

    def status(self, done: float, text: str) -> None:
        """Say nothing of what changes all the time."""

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def close(self) -> None:
        """End the display."""
        sys.stdout.flush()


class Bar:
    """Draws a bar for the part that runs, with what is going on, below the lines that stay."""

    def __init__(self) -> None:
        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            refresh_per_second=8,
            transient=True,
        )
        self._task = self._progress.add_task("", total=1.0, text="")
        self._progress.start()

    def part(self, name: str, seconds: float) -> None:
        """Begin the bar anew."""
        self._progress.reset(self._task, total=seconds or None, description=name, text="")

    def status(self, done: float, text: str) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=done, text=text)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()


def display() -> Lines | Bar:
    """Return the display that suits standard output."""
    return Bar() if sys.stdout.isatty() else Lines()
