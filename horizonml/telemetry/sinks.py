"""Feeds TensorBoard and MLflow from the records of a run, without ever holding up a step.

A running job and `horizonml report` turn the records of the group's rank 0 into the same scalars. While a job runs, a
thread takes them from a bounded queue. When a sink fails, or is slower than the training for long, a warning says so
once, and the training goes on: the file of records has everything, and `horizonml report` catches up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Protocol

from horizonml.errors import JobError
from horizonml.machine.code import require
from horizonml.telemetry.fields import Point, Record
from horizonml.telemetry.kubernetes import Publisher
from horizonml.telemetry.record import SHOWN, EndRecord, EvaluationRecord, StepRecord, metric_key
from horizonml.telemetry.run_info import RunInfo
from horizonml.telemetry.spec import TelemetrySpec

_log = logging.getLogger(__name__)
_WAITING = 10_000  # records
_AT_ONCE = 100  # records that a sink is given together, at most
_CLOSE_SECONDS = 30.0  # for which the end of a run waits for its sinks
TENSORBOARD = "tensorboard"  # the folder in that of a run
_PACKAGES = {"TensorBoard": ("tensorboard",), "MLflow": ("mlflow", "sqlalchemy", "alembic")}


class Sink(Protocol):
    """Shows the scalars of a run somewhere."""

    def describe(self, run: RunInfo) -> None:
        """Take the record that begins a group: its job, plan, host and versions."""

    def write(self, points: Sequence[Point]) -> None:
        """Take points, in the order of time."""

    def close(self, outcome: str) -> None:
        """End, with the outcome that the run recorded last; empty if there is none."""


class Scalars:
    """Gives the records of a run to a sink as scalars."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._step = 0  # that of the last record that has one
        self._outcome = ""  # of the last training that has ended

    def write(self, records: Iterable[Record]) -> None:
        """Give some records to the sink, in order."""
        waiting: list[Point] = []
        for record in records:
            if isinstance(record, RunInfo):
                self._sink.write(waiting)
                self._sink.describe(record)
                waiting = []
            if isinstance(record, EndRecord):
                self._outcome = record.outcome
            point = self._point(record)
            if point is not None:
                waiting.append(point)
        if waiting:
            self._sink.write(waiting)

    def close(self) -> None:
        """End the sink with the outcome of the run."""
        self._sink.close(self._outcome)

    def _point(self, record: Record) -> Point | None:
        self._step = record.resumed_at if isinstance(record, RunInfo) else getattr(record, "step", self._step)
        values = scalars(record)
        return Point(self._step, record.time, values, isinstance(record, RunInfo)) if values else None


def scalars(record: Record) -> dict[str, float]:
    """Return the numbers of a record that are shown, by the names of their scalars, with the task's metrics."""
    found = {how.scalar: getattr(record, field) for field, how in SHOWN.get(type(record), {}).items() if how.scalar}
    values = {name: float(value) for name, value in found.items() if value is not None}
    if isinstance(record, StepRecord | EvaluationRecord):
        values |= {f"{record.prefix}/{metric_key(name)}": mean for name, mean in record.metrics.items()}
    if isinstance(record, StepRecord) and record.wall > 0:
        values["time/samples_per_second"] = record.batch / record.wall
        values[f"time/{record.unit}_per_second"] = record.trained_on / record.wall
    return values


class Feed:
    """Hands the records of a running job to one sink, in a thread."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        """Start the thread, which makes the sink: opening one may take seconds."""
        self._name, self._make = name, make
        self._queue: Queue[Record] = Queue(_WAITING)
        self._ending, self._broken = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Take a record; return at once."""
        if self._broken:
            return
        try:
            self._queue.put_nowait(record)
        except Full:
            self._warn("is slower than the training, and records are left out")

    def close(self) -> None:
        """Hand over what is left, for as long as that takes no more than some seconds."""
        self._ending.set()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self._warn(f"has not taken everything within {_CLOSE_SECONDS:.0f} s")

    def _run(self) -> None:
        try:
            shows = Scalars(self._make())
            while True:
                ending = self._ending.is_set()  # before looking, so that nothing can come in between
                records = self._take()
                if records:
                    shows.write(records)
                elif ending:
                    break
            shows.close()
        except Exception as error:  # noqa: BLE001  (libraries for sinks have errors of many kinds, none worth a training)
            self._warn(f"failed: {(str(error).strip() or type(error).__name__).splitlines()[0]}")

    def _take(self) -> list[Record]:
        """Return the records that are there; wait a moment for the first one."""
        found: list[Record] = []
        deadline = time.monotonic() + 0.2
        while len(found) < _AT_ONCE:
            try:
                found.append(self._queue.get(timeout=max(0.0, deadline - time.monotonic()) if not found else 0.0))
            except Empty:
                break
        return found

    def _warn(self, problem: str) -> None:
        if not self._broken:
            _log.warning("%s %s; `horizonml report` shows the whole run there later", self._name, problem)
        self._broken = True


class Feeds:
    """Hands the records of a running job to all sinks that it asks for."""

    def __init__(self, spec: TelemetrySpec, folder: Path) -> None:
        """`folder` is that of the run; the sinks are opened with the first record, on the rank that has one."""
        self._spec, self._folder, self.kubernetes = spec, folder, Publisher()
        self._feeds: list[Feed] | None = None

    def put(self, record: Record) -> None:
        """Take a record; return at once."""
        self.kubernetes.put(record)
        if self._feeds is None:
            self._feeds = self._open()
        for feed in self._feeds:
            feed.put(record)

    def _open(self) -> list[Feed]:
        found: list[Feed] = []
        folder, uri = self._folder, self._spec.mlflow
        if self._spec.tensorboard:
            found.append(Feed("TensorBoard", lambda: open_tensorboard(folder / TENSORBOARD)))
        if uri is not None:
            found.append(Feed("MLflow", lambda: open_mlflow(uri, folder)))
        return found

    def close(self) -> None:
        """Hand over what is left; see `Feed.close`."""
        for feed in self._feeds or []:
            feed.close()
        self.kubernetes.close()


def check_packages(spec: TelemetrySpec) -> None:
    """Raise MissingPackage unless the packages for the sinks that a job asks for are installed, or JobError."""
    if spec.tensorboard:
        _require("TensorBoard", "telemetry.tensorboard")
    if spec.mlflow is not None:
        _check_folder(spec.mlflow)
        _require("MLflow", "telemetry.mlflow")


def _check_folder(where: str) -> None:
    """Raise JobError for a folder whose path means something else in the URI of its database."""
    folder = Path(where).absolute()
    if "://" not in where and where != "databricks" and any(letter in str(folder) for letter in "?%"):
        raise JobError(
            f"telemetry.mlflow: {folder}: MLflow cannot keep a database below a folder whose name has ? or %"
        )


def open_tensorboard(folder: Path) -> Sink:
    """Return a sink that writes TensorBoard's event files into a folder. Raises MissingPackage."""
    _require("TensorBoard", "TensorBoard")
    from horizonml.telemetry.tensorboard import TensorBoardSink

    return TensorBoardSink(folder)


def open_mlflow(uri: str, folder: Path) -> Sink:
    """Return a sink that logs the run in `folder` to MLflow. Raises HorizonError, or an error of MLflow's."""
    _check_folder(uri)
    _require("MLflow", "MLflow")
    from horizonml.telemetry.mlflow import MlflowSink

    return MlflowSink(uri, folder)


def _require(sink: str, what: str) -> None:
    for package in _PACKAGES[sink]:
        require(package, what)
