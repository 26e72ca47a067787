"""Feeds TensorBoard and MLflow from the records of a run, without ever holding up a step.

A thread takes the records from a bounded queue. When a sink fails, or is slower than the training for long, a warning
says so once, and the training goes on: the file of records has everything, and `horizonml report` catches up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, Protocol

from horizonml.errors import JobError
from horizonml.machine.code import require
from horizonml.telemetry.scalars import Point, Scalars
from horizonml.telemetry.spec import TelemetrySpec

_log = logging.getLogger(__name__)
_WAITING = 10_000  # records
_AT_ONCE = 100  # records that a sink is given together, at most
_CLOSE_SECONDS = 30.0  # for which the end of a run waits for its sinks
TENSORBOARD = "tensorboard"  # the folder in that of a run
_PACKAGES = {"TensorBoard": ("tensorboard",), "MLflow": ("mlflow", "sqlalchemy", "alembic")}


class Sink(Protocol):
    """Shows the scalars of a run somewhere."""

    def describe(self, run: Mapping[str, Any]) -> None:
        """Take the record that begins a group: its job, plan, host and versions."""

    def write(self, points: Sequence[Point]) -> None:
        """Take points, in the order of time."""

    def close(self, outcome: str) -> None:
        """End, with the outcome that the run recorded last; empty if there is none."""


def deliver(sink: Sink, scalars: Scalars, records: Sequence[Mapping[str, Any]]) -> None:
    """Give records to a sink, in order."""
    waiting: list[Point] = []
    for record in records:
        if record.get("kind") == "run":
            sink.write(waiting)
            sink.describe(record)
            waiting = []
        point = scalars.point(record)
        if point is not None:
            waiting.append(point)
    if waiting:
        sink.write(waiting)


class Feed:
    """Hands the records of a running job to one sink, in a thread."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        """Start the thread, which makes the sink: opening one may take seconds."""
        self._name, self._make = name, make
        self._queue: Queue[Mapping[str, Any]] = Queue(_WAITING)
        self._ending, self._broken = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
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
            sink, scalars = self._make(), Scalars()
            while True:
                ending = self._ending.is_set()  # before looking, so that nothing can come in between
                records = self._take()
                if records:
                    deliver(sink, scalars, records)
                elif ending:
                    break
            sink.close(scalars.outcome)
        except Exception as error:  # noqa: BLE001  (libraries for sinks have errors of many kinds, none worth a training)
            self._warn(f"failed: {(str(error).strip() or type(error).__name__).splitlines()[0]}")

    def _take(self) -> list[Mapping[str, Any]]:
        """Return the records that are there; wait a moment for the first one."""
        found: list[Mapping[str, Any]] = []
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
        self._spec, self._folder = spec, folder
        self._feeds: list[Feed] | None = None

    def put(self, record: Mapping[str, Any]) -> None:
        """Take a record; return at once."""
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
