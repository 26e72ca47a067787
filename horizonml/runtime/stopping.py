"""Follows the evaluations of a training: whether it ends early, and which evaluation is the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from horizonml.errors import JobError
from horizonml.job.schema import Job
from horizonml.state.best import KEPT, STOPPING, Best
from horizonml.tasks.task import Task
from horizonml.telemetry.record import metric_key
from horizonml.text import nearest

_HIGHEST = {"accuracy", "exact_match", "f1", "r2", "mean_iou"}
_LOWEST = {"loss", "perplexity", "mae", "rmse"}
_PREFIX = "held_out_"


@dataclass(frozen=True)
class _Followed:
    """Describes a metric that is followed for a purpose."""

    purpose: str
    metric: str
    highest: bool
    min_delta: float = 0.0

    def next(self, before: Best | None, value: float, step: int) -> Best:
        """Return the best evaluation, now that there is another one."""
        if before is None or before.metric != self.metric or not math.isfinite(before.value):
            return Best(metric=self.metric, value=value, step=step)
        gain = value - before.value if self.highest else before.value - value
        if gain > self.min_delta:
            return Best(metric=self.metric, value=value, step=step)
        return before.model_copy(update={"waited": before.waited + 1})


class Evaluations:
    """Follows the metrics that a job names; all ranks come to the same decisions if they are given the same values."""

    def __init__(self, job: Job, task: Task) -> None:
        """Raise JobError if a task does not record a metric that the job names."""
        names = [_PREFIX + metric_key(name) for name in ("loss", *recorded(task))]
        early, kept = job.early_stop, job.checkpoint
        self._patience = early.patience
        self._followed = []
        if early.patience is not None:
            highest = _is_highest("early_stop", early.metric, early.best_is, names)
            self._followed.append(_Followed(STOPPING, early.metric, highest, early.min_delta))
        if kept.keep_best is not None:
            highest = _is_highest("checkpoint", kept.keep_best, kept.best_is, names, "keep_best")
            self._followed.append(_Followed(KEPT, kept.keep_best, highest))

    @property
    def follows(self) -> bool:
        """Return whether the job names any metric."""
        return bool(self._followed)

    def note(self, best: Mapping[str, Best], metrics: Mapping[str, float], step: int) -> dict[str, Best]:
        """Return the best evaluation for each purpose, now that `metrics` were measured after `step` steps."""
        return {one.purpose: one.next(best.get(one.purpose), metrics[one.metric], step) for one in self._followed}

    def ends(self, best: Mapping[str, Best]) -> bool:
        """Return whether training ends early."""
        found = best.get(STOPPING)
        return self._patience is not None and found is not None and found.waited >= self._patience


def recorded(task: Task) -> list[str]:
    """Return the names of the metrics that a task records."""
    return list(task.report(1.0, dict.fromkeys(task.metrics, 1.0)))


def _is_highest(section: str, metric: str, best_is: str, names: list[str], field: str = "metric") -> bool:
    """Return whether the highest value of a metric is the best. Raises JobError."""
    if metric not in names:
        raise JobError(
            f"{section}.{field}: there is no metric {metric!r}{nearest(metric, names)}; this task records "
            f"{', '.join(names)}"
        )
    own = metric.removeprefix(_PREFIX)
    if best_is == "auto" and own not in _HIGHEST | _LOWEST:
        raise JobError(f"{section}.best_is: say whether the lowest or the highest {metric} is best")
    return best_is == "highest" if best_is != "auto" else own in _HIGHEST
