"""Feeds TensorBoard and MLflow from the records of a run, without ever holding up a step.

A thread takes the records from a bounded queue. When a sink fails, or is slower than the training for long, a warning
says so once, and the training goes on: the file of records has everything, and `horizonml log` catches up.

Writes the scalars of a run as TensorBoard's event files, with the writer of the package `tensorboard` itself.

Logs the scalars of a run to MLflow: to a server, or to a database in a folder, which needs none.

MLflow has given up its store of plain files, so a folder holds an SQLite database: `mlflow ui --backend-store-uri
sqlite:///FOLDER/mlflow.db` shows it.

Turns records into the scalars that TensorBoard and MLflow show; the records themselves stay the truth.

Both a running job and `horizonml log` use this function, on the lines of the file of the group's rank 0, so both show
the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, Protocol

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from horizonml.errors import JobError
from horizonml.files import write_atomically
from horizonml.machine.code import require
from horizonml.telemetry.record import EvaluationRecord, StepRecord
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
            _log.warning("%s %s; `horizonml log` shows the whole run there later", self._name, problem)
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

    return TensorBoardSink(folder)


def open_mlflow(uri: str, folder: Path) -> Sink:
    """Return a sink that logs the run in `folder` to MLflow. Raises HorizonError, or an error of MLflow's."""
    _check_folder(uri)
    _require("MLflow", "MLflow")

    return MlflowSink(uri, folder)


def _require(sink: str, what: str) -> None:
    for package in _PACKAGES[sink]:
        require(package, what)


_DT_STRING = 7  # of TensorFlow's types


class TensorBoardSink:
    """Writes one event file into a folder, which may have files of earlier groups of the same run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def describe(self, run: Mapping[str, Any]) -> None:
        """Show the job and the plan as text."""
        for name in ("job", "plan"):
            if name in run:
                self._text(name, json.dumps(run[name], indent=2), run)

    def _text(self, name: str, text: str, run: Mapping[str, Any]) -> None:
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=_DT_STRING, string_val=[f"```json\n{text}\n```".encode()])
        summary = Summary(value=[Summary.Value(tag=name, metadata=metadata, tensor=tensor)])
        step = int(run.get("resumed_at", 0))
        self._writer.add_event(Event(wall_time=float(run.get("time", 0.0)), step=step, summary=summary))

    def write(self, points: Sequence[Point]) -> None:
        """Write one event for each point."""
        for point in points:
            if point.begins and point.step:
                # TensorBoard then forgets the steps after it that an earlier group had done.
                start = SessionLog(status=SessionLog.START)
                self._writer.add_event(Event(wall_time=point.time, step=point.step + 1, session_log=start))
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._writer.add_event(Event(wall_time=point.time, step=point.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, outcome: str) -> None:
        """Close the file."""
        self._writer.close()


_MOST_METRICS = 1000  # in one request
_MOST_PARAMS = 100
_MOST_TEXT = 500  # characters of a parameter's value that every kind of server takes
_MARK = "mlflow.json"  # in a run's folder: which run of MLflow it is
_STATUS = {"complete": "FINISHED", "already complete": "FINISHED", "failed": "FAILED"}


def tracking_uri(where: str) -> str:
    """Return MLflow's URI for a URI or a folder."""
    if "://" in where or where.startswith(("sqlite:", "databricks")):
        return where
    folder = Path(where).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder}/mlflow.db"


class MlflowSink:
    """Logs to one run of MLflow, which goes on when the run does; its experiment has the job's name."""

    def __init__(self, where: str, folder: Path) -> None:
        """Connect; `folder` is that of HorizonML's run, where a file keeps which run of MLflow it is."""
        for name in ("mlflow", "alembic"):  # which report every table that they make
            logging.getLogger(name).setLevel(logging.WARNING)
        self._uri, self._folder, self._id = tracking_uri(where), folder, ""
        self._key = hashlib.sha256(self._uri.encode()).hexdigest()[:16]  # a URI may hold a password
        self._client = MlflowClient(tracking_uri=self._uri)

    def describe(self, run: Mapping[str, Any]) -> None:
        """Take up MLflow's run, or begin it, and log the job's fields as its parameters."""
        job = run.get("job", {})
        self._id = self._id or self._known() or self._begin(str(job.get("name", self._folder.name)), run)
        about = {"plan": json.dumps(run.get("plan")), "host": run.get("host"), **run.get("versions", {})}
        tags = [RunTag(f"horizonml.{key}", str(value)[:_MOST_TEXT]) for key, value in about.items() if value]
        self._client.log_batch(self._id, tags=tags)
        existing = self._client.get_run(self._id).data.params  # a parameter is never changed
        params = [
            Param(key, text[:_MOST_TEXT]) for key, value in _flat(job) if (text := str(value)) and key not in existing
        ]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])

    def write(self, points: Sequence[Point]) -> None:
        """Log the scalars; those that are logged already, with the same time, stay as they are."""
        metrics = [
            Metric(name, value, round(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MOST_METRICS])

    def close(self, outcome: str) -> None:
        """Mark MLflow's run as ended."""
        if self._id:
            self._client.set_terminated(self._id, _STATUS.get(outcome, "KILLED"))

    def _known(self) -> str | None:
        """Return the identifier of MLflow's run, if this run has been logged there before."""
        try:
            found = json.loads((self._folder / _MARK).read_text()).get(self._key)
            return str(self._client.get_run(found).info.run_id) if found else None
        except (OSError, ValueError, AttributeError, MlflowException):
            return None  # it was never there, or it has been deleted

    def _begin(self, name: str, run: Mapping[str, Any]) -> str:
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        begun = self._client.create_run(number, start_time=round(run.get("time", 0) * 1000), run_name=self._folder.name)
        known = {self._key: begun.info.run_id}
        try:
            known = {**json.loads((self._folder / _MARK).read_text()), **known}
        except (OSError, ValueError):
            known = dict(known)  # it is the first one
        write_atomically(self._folder / _MARK, json.dumps(known).encode())
        return str(begun.info.run_id)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of nested mappings, named as `section.field`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# The fields of a step's record that are shown, and the names of their scalars.
_STEP = {
    "loss": "train/loss",
    "epoch": "train/epoch",
    "lr": "train/learning_rate",
    "gradient_norm": "train/gradient_norm",
    "divergence": "train/gradient_divergence",
    "skipped": "train/skipped_samples",
    "wall": "time/step_seconds",
    "compute": "time/compute_seconds",
    "transfer": "time/transfer_seconds",
    "wait": "time/wait_seconds",
    "load": "time/loading_seconds",
    "bytes_sent": "rank_0/bytes_sent",
    "bytes_received": "rank_0/bytes_received",
    "cpu_seconds": "rank_0/cpu_seconds",
    "rss_bytes": "rank_0/memory_bytes",
    "joules": "rank_0/joules",
    "local_steps": "rank_0/local_steps",
}
_EVALUATION = {"loss": "held_out/loss", "seconds": "time/evaluation_seconds"}
_RUN = {"generation": "group/generation", "world_size": "group/ranks"}
_RECOVERY = {"seconds": "group/recovery_seconds", "steps_repeated": "group/steps_repeated"}
_CHECKPOINT = {"seconds": "time/checkpoint_seconds"}
_STEP_FIELDS = frozenset(field.name for field in fields(StepRecord)) | {"kind"}
_EVALUATION_FIELDS = frozenset(field.name for field in fields(EvaluationRecord)) | {"kind"}


@dataclass(frozen=True)
class Point:
    """Holds the scalars of one record."""

    step: int  # the number of steps that are done
    time: float  # Unix time
    values: Mapping[str, float]  # by name
    begins: bool = False  # whether a group begins here, so that later steps of the group before it do not count


class Scalars:
    """Turns the records of a run into points, one after the other."""

    def __init__(self) -> None:
        self._step = 0  # that of the last record that has one
        self.outcome = ""  # of the last training that has ended

    def point(self, record: Mapping[str, Any]) -> Point | None:
        """Return the scalars of a record as it stands in a rank's file, or None if it has none."""
        kind = record.get("kind")
        self._step = int(record.get("resumed_at" if kind == "run" else "step", self._step))
        match kind:
            case "step":
                values = _named(record, _STEP) | _metrics(record, _STEP_FIELDS, "train")
                if record["wall"] > 0:
                    values["time/samples_per_second"] = record["batch"] / record["wall"]
                    if record.get("unit", "samples") != "samples":
                        values[f"time/{record['unit']}_per_second"] = record["units"] / record["wall"]
            case "evaluation":
                values = _named(record, _EVALUATION) | _metrics(record, _EVALUATION_FIELDS, "held_out")
            case "run":
                values = _named(record, _RUN)
            case "recovery":
                values = _named(record, _RECOVERY)
            case "checkpoint":
                values = _named(record, _CHECKPOINT)
            case "end":
                self.outcome = str(record["outcome"])
                return None
            case _:
                return None
        return Point(self._step, float(record.get("time", 0.0)), values, kind == "run")


def _named(record: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """Return the fields of a record that have a value, by the names of their scalars."""
    return {name: float(record[field]) for field, name in names.items() if _is_number(record.get(field))}


def _metrics(record: Mapping[str, Any], known: frozenset[str], prefix: str) -> dict[str, float]:
    """Return what is not a field of every record: the task's metrics."""
    return {
        f"{prefix}/{name}": float(value) for name, value in record.items() if name not in known and _is_number(value)
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
