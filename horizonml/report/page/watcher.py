"""Follows a run in a thread, and keeps ready what the page asks for."""

from __future__ import annotations

import json
import logging
import math
import threading
from pathlib import Path
from typing import Any

from horizonml.report.live import LiveRun
from horizonml.report.live_facts import Series
from horizonml.report.page.describe import SimulatedStep, describe_run, describe_timeline, problem_of
from horizonml.telemetry.record import EvaluationRecord

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0  # between two looks at the records
_CLOSE_SECONDS = 5.0
_READING = {"state": "reading", "words": "the records are being read"}


class Watcher:
    """Reads the records of a run as they come."""

    def __init__(self, folder: Path) -> None:
        """Begin to follow the run in `folder`, which need not be there yet."""
        self._folder = folder
        self._lock = threading.Lock()  # held while what is below changes, which never takes long
        self._loss = Series()  # loss, accuracy, seconds of a step
        self._split: dict[int, Series] = {}  # compute, transfer, wait: by rank
        self._described: dict[str, object] = dict(_READING, name=folder.absolute().name)
        self._timeline: dict[str, object] | None = None  # recorded
        self._predicted: dict[str, object] | None = None
        self._evaluations: list[EvaluationRecord] = []
        self._events: list[dict[str, object]] = []
        self._simulated = SimulatedStep()
        self._run = LiveRun(folder)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="page, records", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following."""
        self._over.set()
        self._thread.join(_CLOSE_SECONDS)

    def run(self) -> dict[str, object]:
        """Return how the run stands."""
        with self._lock:
            return dict(self._described)

    def timeline(self, known: int, is_predicted: bool) -> dict[str, object] | None:
        """Return what the ranks did when in the newest step of which that is recorded, or None.

        If none is recorded, or if `is_predicted` asks for it, it is a simulated one. A client that has one of step
        `known` already gets no more than its number, unless there is a newer one.
        """
        with self._lock:
            found = self._predicted if is_predicted or self._timeline is None else self._timeline
        if found is not None and not found["is_simulated"] and found["step"] == known:
            return {"step": known}
        return found

    def events(self) -> list[dict[str, object]]:
        """Return what has happened, the oldest first."""
        with self._lock:
            return self._events

    def history(self, since: int, revision: int) -> dict[str, object]:
        """Return the points that are newer than those of a client, or all if its revision is an old one."""
        with self._lock:
            loss, split, evaluations = self._loss, self._split, self._evaluations
        now = max(series.revision for series in (loss, *split.values()))
        if revision != now:
            since = 0
        return {
            "revision": now,
            "since": since,
            "columns": ["step", "loss", "accuracy", "seconds"],
            "steps": loss.since(since),
            "rank_columns": ["step", "compute", "transfer", "wait"],
            "ranks": {str(rank): series.since(since) for rank, series in split.items()},
            "evaluations": [
                {"step": one.step, "epoch": one.epoch, "loss": one.loss, "accuracy": one.accuracy, "best": one.best}
                for one in evaluations
                if one.step >= since
            ],
        }

    def _follow(self) -> None:
        known: set[str] = set()
        while not self._over.is_set():
            try:
                self._run.poll()
                self._describe()
            except Exception as error:  # noqa: BLE001  (damaged records end neither the page nor what it runs beside)
                words = f"{type(error).__name__}: {error}"
                if words not in known:
                    _log.warning("the records in %s cannot be read: %s", self._folder, words)
                known.add(words)
                with self._lock:
                    self._described = {**self._described, "problem": "the records could not be read; see the log"}
            self._over.wait(_LOOK_SECONDS)

    def _describe(self) -> None:
        run = self._run
        described = describe_run(run)
        described["problem"] = problem_of(self._folder, run.planning)
        timeline, predicted = describe_timeline(run), self._simulated.timeline(run.planning)
        described["has_both_timelines"] = timeline is not None and predicted is not None
        events = [vars(event) for event in run.events]
        with self._lock:
            self._described, self._timeline, self._predicted = described, timeline, predicted
            self._events, self._evaluations = events, list(run.evaluations)
            self._loss, self._split = run.curve, run.splits


def encode(value: Any) -> bytes:
    """Return a value as JSON that browsers read: numbers that are not finite become null."""
    return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
