"""Records what happens in a run: in the rank's file, in its metrics, and on the screen of the first rank.

What ranks report of their steps is added up for the records of rank 0, as other ranks may record in other folders.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from horizonml.engine.clock import KINDS, Clock, StepResult, StepSums, Totals
from horizonml.machine.host import cpu_seconds, rss_bytes
from horizonml.machine.sensors import EnergyMeter
from horizonml.telemetry.fields import Record
from horizonml.telemetry.lifeline import Lifeline
from horizonml.telemetry.log import JsonLines
from horizonml.telemetry.metrics import Metrics
from horizonml.telemetry.record import (
    AloneRecord,
    CheckpointRecord,
    CheckpointSkippedRecord,
    EndRecord,
    EvaluationRecord,
    FollowedRecord,
    Observer,
    RanksRecord,
    RankSums,
    RecordedSpan,
    RecoveryRecord,
    SlowdownsRecord,
    StateSource,
    StepRecord,
    TimelineRecord,
    judged,
    metric_text,
)
from horizonml.telemetry.run_info import RunInfo
from horizonml.telemetry.sinks import Feeds
from horizonml.text import human_seconds, plain_lines

_LINE_SECONDS = 15.0
_LONG_SECONDS = 20.0  # from which on the time that is left is shown
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


class _Window:
    """Averages over the last steps."""

    def __init__(self) -> None:
        self._records: list[StepRecord] = []

    def add(self, record: StepRecord) -> None:
        self._records = [*self._records[1 - _WINDOW :], record]

    @property
    def seconds(self) -> float:
        """Return how long a step takes."""
        return sum(record.wall for record in self._records) / max(1, len(self._records))

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

    def __init__(self, epochs: int, steps: int = 0, unigram: float | None = None) -> None:
        """Print lines about a run of so many epochs and steps."""
        self._epochs, self._window, self._last = epochs, _Window(), time.monotonic()
        self._steps, self._unigram = steps, unigram

    def message(self, text: str) -> None:
        print(plain_lines(text), flush=True)

    def step(self, record: StepRecord) -> None:
        self._window.add(record)
        if time.monotonic() - self._last > _LINE_SECONDS:
            self._last = time.monotonic()
            print(
                f"epoch {record.epoch}/{self._epochs}: step {record.step}, {judged(record.loss, record.metrics)} | "
                f"{self._window.words()}{self._left(record.step)}",
                flush=True,
            )

    def evaluation(self, record: EvaluationRecord) -> None:
        self._last = time.monotonic()
        print(
            " | ".join(filter(None, [_evaluated(record, self._epochs, self._unigram), self._window.words()]))
            + self._left(record.step),
            flush=True,
        )

    def _left(self, step: int) -> str:
        """Return how long the rest takes at the present speed, if that is long."""
        left = (self._steps - step) * self._window.seconds
        return f" | {human_seconds(left)} left" if left >= _LONG_SECONDS else ""

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


def display_for(rank: int, epochs: int, steps: int, done: int, unigram: float | None = None) -> Display:
    """Return the display that suits this rank and its standard output.

    `unigram` is shown beside the perplexity of a language model.
    """
    if rank != 0:
        return Display()
    return Bar(epochs, steps, done, unigram) if sys.stdout.isatty() else Lines(epochs, steps, unigram)


_SECONDS = 1.0  # between two records of what the ranks tell
_WARM_UP = 3  # steps that pay for caches and connections
_LAST_STEPS = 200  # over which the speed of all devices together is measured
_MOST = 1e15  # which what a rank tells stays below, unless it lies
_MEASURED = [one.name for one in fields(StepRecord) if one.name in {own.name for own in fields(StepResult)}]


def _sums(sums: StepSums) -> RankSums | None:
    """Return what a rank has told in few digits; None if it has told nothing, or nothing that can be."""
    if not all(0 <= value < _MOST for value in sums) or sums.steps < 1 or sums.wall <= 0:
        return None
    names = ("wall", "compute", "transfer", "wait", "cpu_seconds")
    return RankSums(
        steps=int(sums.steps),
        **{name: float(f"{getattr(sums, name):.6g}") for name in names},
        rss_bytes=int(sums.rss_bytes),
        links={way: (int(sent), int(back)) for way, (sent, back) in sums.links.items() if sent or back},
    )


@dataclass(frozen=True)
class Outage:
    """Describes the loss of ranks, as a rank knows it that goes on."""

    began: float  # when the loss was known here, a time of `monotonic`
    lost: list[int]  # by the numbers that they were started with
    silent_seconds: float | None  # for which they had been silent by then, if that is known
    step: int  # the number of steps that had been done here


class Recorder:
    """Writes one rank's records of a run."""

    def __init__(
        self,
        path: Path,
        display: Display,
        info: RunInfo,
        timeline_every: int,
        metrics: Metrics | None = None,
        energy: EnergyMeter | None = None,
        lifeline: Lifeline | None = None,
        feeds: Feeds | None = None,
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the rank's file at `path` and record `info` in it.

        `energy` is this machine's meter; `lifeline` is what tells the next process where this one was; `feeds` get
        what the file gets. `on_gone` is called when somebody has deleted the file.
        """
        self._energy = energy if energy is not None and energy.available else None
        self._joules = 0.0
        self._lines, self._display, self._timeline_every = JsonLines(path, on_gone), display, timeline_every
        self._metrics, self._lifeline, self._feeds = metrics, lifeline, feeds
        self.observer: Observer = lambda record: None  # gets steps and evaluations
        self._told: list[StepSums] = []  # what the ranks have told since the last record of it
        self._told_since = time.monotonic()
        self.steps, self._number = 0, 0  # recorded; the newest one's number
        self._last = deque[tuple[int, float]](maxlen=_LAST_STEPS)  # the samples and seconds of the last steps
        self.quickest = math.inf  # seconds that a whole batch took this rank to compute, at the least
        self._rank = info.rank
        self._at_next_step: Callable[[], None] | None = None
        self._write(replace(info, time=time.time()))
        self._cpu = cpu_seconds()

    def _write(self, record: Record, everywhere: bool = True) -> None:
        """Add a record to the file, and hand it to those that show it elsewhere."""
        self._lines.write(record.to_json())
        if self._feeds is not None and everywhere:
            self._feeds.put(record)

    def message(self, text: str) -> None:
        """Show a message to the user."""
        self._display.message(text)

    def step(self, step: StepResult, number: int, epoch: int, batch: int, lr: float, skipped: int = 0) -> None:
        """Record a step; `number` and `epoch` count from 1. `skipped` samples of the batch were replaced."""
        cpu = cpu_seconds()
        record = StepRecord(
            step=number,
            epoch=epoch,
            time=time.time(),
            batch=batch,
            loss=step.totals.loss,
            metrics=step.totals.metrics,
            unit=step.totals.unit,
            units=step.totals.units,
            lr=lr,
            links=step.traffic,
            bytes_sent=step.bytes_sent,
            bytes_received=step.bytes_received,
            joules=self._joules_since(),
            cpu_seconds=cpu - self._cpu,
            rss_bytes=rss_bytes(),
            skipped=skipped,
            **{name: getattr(step, name) for name in _MEASURED},
        )
        self._cpu = cpu
        self._write(record)
        if self._rank == 0 and step.told:
            before = self._told or [StepSums()] * len(step.told)
            self._told = [one.plus(more) for one, more in zip(before, step.told, strict=True)]
            if time.monotonic() - self._told_since >= _SECONDS:
                self._write_told(number)
        if self._at_next_step is not None:
            self._at_next_step()
            self._at_next_step = None
        if self._timeline_every and number % self._timeline_every == 0:
            offset = Clock.unix_offset()
            spans = [RecordedSpan(s.kind, s.what, s.micro, s.start + offset, s.end + offset) for s in step.spans]
            self._write(TimelineRecord(number, spans), everywhere=False)
        self._display.step(record)
        self.observer(record)
        if self._metrics is not None:
            self._metrics.step(record, step)
        if self._lifeline is not None:
            self._lifeline.beat(number, record.rss_bytes)
        self.steps, self._number = self.steps + 1, number
        self._last.append((batch, record.wall))

    @property
    def speed(self) -> float:
        """Return the samples per second of the last steps, without the first few of this group; 0 if there are none."""
        settled = list(self._last)[min(_WARM_UP, self.steps // 2) if self.steps <= _LAST_STEPS else 0 :]
        seconds = sum(wall for _, wall in settled)
        return sum(batch for batch, _ in settled) / seconds if seconds else 0.0

    def alone(self, together: float, alone: Sequence[float | None], names: Sequence[str]) -> None:
        """Record how many samples a second all devices train on together, and each of them alone."""
        self._write(AloneRecord(time.time(), together, alone, names), everywhere=False)

    def _write_told(self, number: int) -> None:
        """Record what the ranks have told until the agreement of step `number`, if it is anything."""
        ranks = [_sums(one) for one in self._told]
        self._told, self._told_since = [], time.monotonic()
        if any(ranks):
            self._write(RanksRecord(number, time.time(), ranks), everywhere=False)

    def evaluation(
        self,
        totals: Totals,
        number: int,
        epoch: int,
        seconds: float,
        *,
        within_epoch: bool = False,
        best: bool = False,
    ) -> None:
        """Record an evaluation on held-out data after step `number`, which may be within an epoch.

        `best` says that its checkpoint is kept as the best one.
        """
        record = EvaluationRecord(
            number, epoch, time.time(), seconds, totals.loss, totals.metrics, totals.samples, within_epoch, best
        )
        self._write(record)
        self._display.evaluation(record)
        self.observer(record)
        if self._metrics is not None:
            self._metrics.evaluation(record)

    def slowdowns(
        self, slowdowns: Sequence[float], stragglers: Sequence[int] | None, reasons: Sequence[str], number: int
    ) -> None:
        """Record how the ranks' computing compares with the plan, as found after step `number`.

        `slowdowns[r]` is how many times as long as planned rank r computes, relative to the other ranks. `reasons[r]`
        says what holds its device back, if that is known. `stragglers` are the ranks that take too long if the user
        should hear of them or of the reasons now, or else None.
        """
        factors = [round(factor, 4) for factor in slowdowns]
        known = {str(rank): reason for rank, reason in enumerate(reasons) if reason}
        record = SlowdownsRecord(number, time.time(), factors, stragglers, known)
        self._write(record, everywhere=False)
        if self._metrics is not None:
            self._metrics.slowdown(slowdowns[self._rank])
        if stragglers is not None:
            self._display.message(f"step {number}: {record.words()}")

    def replanned(self) -> None:
        """Record that training goes on by a better plan."""
        if self._metrics is not None:
            self._metrics.replanned()

    def checkpoint(self, number: int, saved: bool, seconds: float, writing: float = 0.0) -> None:
        """Record that a checkpoint was saved after step `number`, or that saving it failed.

        Training waited for `seconds`; for the seconds of `writing`, it went on.
        """
        self._write(CheckpointRecord(number, time.time(), saved, seconds, writing))
        if self._metrics is not None:
            self._metrics.checkpoint(number, saved, seconds + writing)

    def followed(self, number: int, steps: int, received: int) -> None:
        """Record that this rank works on samples from step `number` on, and has followed the others until then.

        While they made so many `steps`, it has `received` so many bytes of state; any others came while all waited.
        """
        self._write(FollowedRecord(number, time.time(), steps, received), everywhere=False)

    def replica(self, age_steps: int | None, covered: bool) -> None:
        """Show how old the copy of this rank's state is in another rank's memory; see `Metrics.replica`."""
        if self._metrics is not None:
            self._metrics.replica(age_steps, covered)

    def checkpoint_skipped(self, number: int) -> None:
        """Record that the checkpoint due after step `number` was left out: one is still being written."""
        self._write(CheckpointSkippedRecord(number, time.time()), everywhere=False)
        if self._metrics is not None:
            self._metrics.checkpoint_skipped()

    def after(self, outage: Outage, generation: int, source: StateSource, step: int) -> None:
        """Record the recovery from an outage once the next step has ended; training goes on from `step`."""

        def record() -> None:
            seconds, repeated = time.monotonic() - outage.began, max(0, outage.step - step)
            lost, silent = outage.lost, outage.silent_seconds
            self._write(RecoveryRecord(time.time(), generation, lost, seconds, repeated, source, silent))
            if self._metrics is not None:
                self._metrics.recovered(seconds, repeated, source)

        self._at_next_step = record

    def skip(self) -> None:
        """Exclude what happened since the last step (an evaluation, a checkpoint) from every step."""
        self._cpu = cpu_seconds()
        self._joules_since()

    def _joules_since(self) -> float | None:
        """Return the joules since the last call, or None if the machine does not measure them."""
        total = self._energy.joules() if self._energy is not None else None
        if total is None:
            return None
        before, self._joules = self._joules, total
        return total - before

    def close(self, outcome: str) -> None:
        """End the file with the outcome of the run."""
        self._write_told(self._number)
        self._write(EndRecord(time.time(), outcome))
        self._lines.close()
        self._display.close()
