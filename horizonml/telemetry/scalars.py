"""Turns records into the scalars that TensorBoard and MLflow show; the records themselves stay the truth.

A running job and `horizonml report` use this function alike, on the lines of the group's rank 0, so both show
the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from horizonml.telemetry.record import EvaluationRecord, StepRecord

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
