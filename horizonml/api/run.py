"""Implements `horizonml.Run`: what a run has recorded and saved."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horizonml.api.given import Given, in_this_process
from horizonml.api.history import Evaluation, Step, Table, read_records
from horizonml.api.jobs import DataLike, ModelLike, TaskLike, make_job
from horizonml.errors import HorizonError
from horizonml.job.schema import Job
from horizonml.plan.plan import Plan

if TYPE_CHECKING:
    from torch import nn


class Run:
    """Gives access to what a run has recorded and saved; `horizonml.train` returns one.

    `Run("runs/first")` opens the run of an earlier process. If its model, its data or its task were given as objects
    then, give them again.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: ModelLike = None,
        data: DataLike = None,
        task: TaskLike = None,
        given: Given | None = None,
        job: Job | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._given, self._job = given or Given(), job
        if any(thing is not None for thing in (model, data, task)):
            self._job, self._given = make_job(self.job, model, data, task)

    @cached_property
    def _records(self) -> tuple[dict[str, Any], Table[Step], Table[Evaluation]]:
        """Return what the ranks have recorded. Raises HorizonError."""
        about, steps, evaluations = read_records(self.folder)
        if about is None:
            raise HorizonError(f"{self.folder} has no records of a run (rank-*.jsonl)")
        return about, steps, evaluations

    @property
    def job(self) -> Job:
        """Return the job, with all its fields."""
        if self._job is None:
            self._job = Job.model_validate(self._records[0]["job"])
        return self._job

    @property
    def plan(self) -> Plan:
        """Return the plan that the ranks trained by last."""
        return Plan.from_json(self._records[0]["plan"])

    @property
    def history(self) -> Table[Step]:
        """Return the training steps in order, with their loss, metrics and seconds."""
        return self._records[1]

    @property
    def evaluations(self) -> Table[Evaluation]:
        """Return the evaluations on held-out data in order."""
        return self._records[2]

    @property
    def metrics(self) -> dict[str, float]:
        """Return the loss and the metrics of the last evaluation on held-out data; empty before the first one."""
        if not self.evaluations:
            return {}
        last = self.evaluations[-1]
        return {"loss": last.loss, **last.metrics}

    def model(self, best: bool = False, average: bool | None = None) -> nn.Module:
        """Return the model with the trained values, as an ordinary module in evaluation mode.

        The values are those of the newest checkpoint, or with `best` those of the best one (see `checkpoint.keep_best`
        in the job). With `average`, parameters are their moving averages; without a choice, they are if the run
        evaluated those (see `ema.evaluate`). Raises HorizonError.
        """
        from horizonml.exports.trained import load_trained

        with in_this_process():
            return load_trained(self.checkpoint(best), job=self.installed(), average=average).module

    def checkpoint(self, best: bool = False) -> Path:
        """Return the folder of the newest intact checkpoint, or of the best one. Raises HorizonError."""
        from horizonml.state.keeping import find_best
        from horizonml.state.shards import find

        return (find_best if best else find)(self.folder)[0]

    def report(self, page: str | os.PathLike[str] | None = None) -> Path:
        """Write the report of `horizonml report` on one HTML page, by default into the run's folder; return its path.

        Raises HorizonError; matplotlib has to be installed.
        """
        from horizonml.bench.report import write_report
        from horizonml.machine.extras import require

        require("matplotlib", "Run.report")
        return write_report(self.folder, Path(page) if page is not None else None)[0]

    def installed(self) -> Job | None:
        """Let jobs find the objects that this run was given, and return its job if it is known."""
        self._given.install()
        return self._job

    def __repr__(self) -> str:
        about, steps, _ = self._records
        parts = [f"{len(steps):,} steps", *(f"held-out {name} {value:.4g}" for name, value in self.metrics.items())]
        return f"Run({str(self.folder)!r}: {about['job']['name']}, {', '.join(parts)})"
