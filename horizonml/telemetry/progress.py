"""Shows the progress of a training to a person: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from horizonml.engine.clock import KINDS
from horizonml.telemetry.record import EvaluationRecord, Observer, StepRecord, judged, metric_text
from horizonml.text import plain_lines

_LINE_SECONDS = 15.0
_WINDOW = 20  # steps over which the speed and the time split are averaged


class Display:
    """Shows the progress of a training; as it is, it shows nothing."""

    def message(self, text: str) -> None:
        """Show a message."""

    def step(self, record: StepRecord) -> None:
        """Show a completed step."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Show the results of an evaluation."""

    def close(self) -> None:
        """End the display."""


class Silent(Display):
    """Shows nothing, on all ranks except the first."""


class _Window:
    """Averages over the last steps."""

    def __init__(self) -> None:
        self._records: list[StepRecord] = []

    def add(self, record: StepRecord) -> None:
        self._records = [*self._records[1 - _WINDOW :], record]

    def words(self, short: bool = False) -> str:
        """Return the averages in words; nothing if no step has been done, as in a state that outlived its group."""
        if not self._records:
            return ""
        wall = sum(record.wall for record in self._records)
        speed = sum(record.trained_on for record in self._records) / wall
        parts = {kind: sum(record.seconds(kind) for record in self._records) / wall for kind in KINDS}
        if short:
            return f"{speed:,.0f}/s, {'/'.join(f'{100 * part:.0f}' for part in parts.values())}%"
        split = " ".join(f"{name} {part:.0%}" for name, part in parts.items())
        return f"{speed:,.0f} {self._records[-1].unit}/s | {split}"


def _evaluated(record: EvaluationRecord, epochs: int, unigram: float | None) -> str:
    step = f", step {record.step}" if record.within_epoch else ""
    found = judged(record.loss, record.metrics, unigram)
    return f"epoch {record.epoch}/{epochs}{step}: held-out {found} ({record.samples} samples)"


class Lines(Display):
    """Prints plain lines: one per epoch, and some within long epochs."""

    def __init__(self, epochs: int, unigram: float | None = None) -> None:
        self._epochs, self._window, self._last = epochs, _Window(), time.monotonic()
        self._unigram = unigram

    def message(self, text: str) -> None:
        print(plain_lines(text), flush=True)

    def step(self, record: StepRecord) -> None:
        self._window.add(record)
        if time.monotonic() - self._last > _LINE_SECONDS:
            self._last = time.monotonic()
            print(
                f"epoch {record.epoch}/{self._epochs}: step {record.step}, {judged(record.loss, record.metrics)} | "
                f"{self._window.words()}",
                flush=True,
            )

    def evaluation(self, record: EvaluationRecord) -> None:
        self._last = time.monotonic()
        print(
            " | ".join(filter(None, [_evaluated(record, self._epochs, self._unigram), self._window.words()])),
            flush=True,
        )

    def close(self) -> None:
        sys.stdout.flush()


class Bar(Display):
    """Draws a progress bar with the current loss, metrics, speed and time split (compute/transfer/wait)."""

    def __init__(self, epochs: int, steps: int, done: int, unigram: float | None = None) -> None:
        self._epochs, self._window, self._unigram = epochs, _Window(), unigram
        self._console = Console()
        self._wide = self._console.width >= 120
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}/" + str(epochs)),
            BarColumn(bar_width=24 if self._wide else 8),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[words]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("", total=steps, completed=done, epoch=1, words="")
        self._progress.start()

    def message(self, text: str) -> None:
        self._console.print(plain_lines(text), highlight=False, markup=False)

    def step(self, record: StepRecord) -> None:
        self._window.add(record)
        metrics = (f"{name[:3]} {metric_text(name, value, 1)} " for name, value in record.metrics.items())
        words = f"loss {record.loss:.4f} {''.join(metrics)}{self._window.words(short=not self._wide)}"
        self._progress.update(self._task, completed=record.step, epoch=record.epoch, words=words)

    def evaluation(self, record: EvaluationRecord) -> None:
        self.message(_evaluated(record, self._epochs, self._unigram))

    def close(self) -> None:
        self._progress.stop()


class Observed(Display):
    """Shows what another display shows, and hands every record to an observer."""

    def __init__(self, display: Display, observer: Observer) -> None:
        self._display, self._observer = display, observer

    def message(self, text: str) -> None:
        self._display.message(text)

    def step(self, record: StepRecord) -> None:
        self._display.step(record)
        self._observer(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._display.evaluation(record)
        self._observer(record)

    def close(self) -> None:
        self._display.close()


def display_for(
    rank: int, epochs: int, steps: int, done: int, observer: Observer | None = None, unigram: float | None = None
) -> Display:
    """Return the display that suits this rank and its standard output; rank 0 hands its records to an `observer`.

    `unigram` is shown beside the perplexity of a language model.
    """
    if rank != 0:
        return Silent()
    display: Display = Bar(epochs, steps, done, unigram) if sys.stdout.isatty() else Lines(epochs, unigram)
    return display if observer is None else Observed(display, observer)
