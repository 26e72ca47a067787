"""Takes down what happens in a run: to the rank's file, its metrics, and the screen of the first rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from horizonml.engine.clock import Clock
from horizonml.engine.engine import Step, Totals
from horizonml.machine.energy import EnergyMeter
from horizonml.machine.usage import cpu_seconds, rss_bytes
from horizonml.runtime.stragglers import Slowdowns
from horizonml.telemetry.log import JsonLines
from horizonml.telemetry.metrics import Metrics
from horizonml.telemetry.progress import Display
from horizonml.telemetry.record import EvaluationRecord, StepRecord


class Recorder:
    """One rank's records of a run."""

    def __init__(
        self,
        path: Path,
        display: Display,
        about: dict[str, Any],
        timeline_every: int,
        metrics: Metrics | None = None,
        energy: EnergyMeter | None = None,
    ) -> None:
        """`about` describes the rank and the run; it is the first record of the file. `energy` is this machine's."""
        self._energy = energy if energy is not None and energy.available else None
        self._joules = 0.0
        self._lines, self._display, self._timeline_every = JsonLines(path), display, timeline_every
        self._metrics, self.steps = metrics, 0  # steps recorded
        self._rank = about["rank"]
        self._lines.write({"kind": "run", "time": time.time(), **about})
        self._cpu = cpu_seconds()

    def message(self, text: str) -> None:
        """Tell the user something."""
        self._display.message(text)

    def step(self, step: Step, number: int, epoch: int, batch: int, lr: float) -> None:
        """Record a step; `number` and `epoch` count from 1."""
        cpu = cpu_seconds()
        record = StepRecord(
            step=number,
            epoch=epoch,
            time=time.time(),
            wall=step.wall,
            compute=step.compute,
            transfer=step.transfer,
            wait=step.wait,
            samples=step.samples,
            batch=batch,
            loss=step.totals.loss,
            accuracy=step.totals.accuracy,
            lr=lr,
            bytes_sent=step.bytes_sent,
            bytes_received=step.bytes_received,
            links=step.traffic,
            joules=self._joules_since(),
            cpu_seconds=cpu - self._cpu,
            rss_bytes=rss_bytes(),
            divergence=step.divergence,
        )
        self._cpu = cpu
        self._lines.write(record.to_json())
        if self._timeline_every and number % self._timeline_every == 0:
            self._lines.write(_timeline(step, number))
        self._display.step(record)
        if self._metrics is not None:
            self._metrics.step(record, step)
        self.steps += 1

    def evaluation(self, totals: Totals, number: int, epoch: int, seconds: float) -> None:
        """Record an evaluation on held-out data after step `number`."""
        record = EvaluationRecord(number, epoch, time.time(), seconds, totals.loss, totals.accuracy, totals.samples)
        self._lines.write(record.to_json())
        self._display.evaluation(record)
        if self._metrics is not None:
            self._metrics.evaluation(record)

    def slowdowns(self, look: Slowdowns, number: int) -> None:
        """Record how ranks' computing compares with the plan, as found after step `number`."""
        factors = [round(factor, 4) for factor in look.slowdowns]
        self._lines.write({"kind": "slowdowns", "step": number, "time": time.time(), "slowdowns": factors})
        if self._metrics is not None:
            self._metrics.slowdown(look.slowdowns[self._rank])
        if look.news:
            told = ", ".join(f"rank {rank} computes {factors[rank]:.1f} times as long" for rank in look.stragglers)
            found = f"{told} as planned, compared with the others" if told else "all are as fast as planned again"
            self._display.message(f"step {number}: {found}")

    def checkpoint(self, number: int, saved: bool, seconds: float) -> None:
        """Record that a checkpoint was saved after step `number`, or could not be."""
        self._lines.write(
            {"kind": "checkpoint", "step": number, "time": time.time(), "saved": saved, "seconds": seconds}
        )
        if self._metrics is not None:
            self._metrics.checkpoint(number, saved, seconds)

    def skip(self) -> None:
        """What happened since the last step (an evaluation, a checkpoint) belongs to no step."""
        self._cpu = cpu_seconds()
        self._joules_since()

    def _joules_since(self) -> float | None:
        """Joules since the last call."""
        total = self._energy.joules() if self._energy is not None else None
        if total is None:
            return None
        before, self._joules = self._joules, total
        return total - before

    def close(self, outcome: str) -> None:
        """End the file with how the run ended."""
        self._lines.write({"kind": "end", "time": time.time(), "outcome": outcome})
        self._lines.close()
        self._display.close()


def _timeline(step: Step, number: int) -> dict[str, Any]:
    """The spans of a step in Unix time, so that those of several ranks can be laid side by side."""
    offset = Clock.unix_offset()
    spans = [[s.kind, s.what, s.micro, s.start + offset, s.end + offset] for s in step.spans]
    return {"kind": "timeline", "step": number, "spans": spans}
