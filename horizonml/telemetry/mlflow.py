"""Logs the scalars of a run to MLflow: to a server, or to a database in a folder, which needs none.

MLflow has given up its store of plain files, so a folder holds an SQLite database: `mlflow ui --backend-store-uri
sqlite:///FOLDER/mlflow.db` shows it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from horizonml.files import write_atomically
from horizonml.telemetry.fields import Point
from horizonml.telemetry.run_info import RunInfo

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

    def describe(self, run: RunInfo) -> None:
        """Take up MLflow's run, or begin it, and log the job's fields as its parameters."""
        found = run.to_json()
        job = found["job"] or {}
        self._id = self._id or self._known() or self._begin(str(job.get("name", self._folder.name)), run.time)
        about = {"plan": json.dumps(found["plan"]), "host": run.host, **run.versions}
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

    def _begin(self, name: str, began: float) -> str:
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        begun = self._client.create_run(number, start_time=round(began * 1000), run_name=self._folder.name)
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
