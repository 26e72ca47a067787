"""Implements `horizonml.Run`: what a run has recorded, as tables of typed rows, and what it has saved."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from horizonml.api.given import Given, in_this_process
from horizonml.api.jobs import DataLike, ModelLike, TaskLike, make_job
from horizonml.errors import HorizonError, MissingPackage
from horizonml.job.schema import Job
from horizonml.plan.plan import Plan
from horizonml.report.records import lead_records
from horizonml.telemetry.record import SHOWN, EvaluationRecord, StepRecord
from horizonml.telemetry.run_info import RunInfo

if TYPE_CHECKING:
    import pandas
    from torch import nn

_SHOWN = 10  # rows of a table that is printed


@dataclass(frozen=True)
class Step:
    """Describes one training step: what `on_step` receives, and a row of `Run.history`."""

    step: int  # counted from 1 over the whole run
    epoch: int  # counted from 1
    loss: float  # mean over the global batch
    metrics: Mapping[str, float]  # the task's metrics by name, means over the global batch
    seconds: float  # that the step took
    samples: int  # in the global batch
    learning_rate: float
    measured: Mapping[str, float | None] = field(default_factory=dict)  # everything else, as `StepRecord` names it

    @classmethod
    def from_record(cls, record: StepRecord) -> Step:
        """Return the step that a rank's record describes."""
        measured = {name: getattr(record, name) for name in SHOWN[StepRecord] if name not in _OF_STEP}
        return cls(
            record.step,
            record.epoch,
            record.loss,
            record.metrics,
            record.wall,
            record.batch,
            record.lr,
            measured,
        )


_OF_STEP = {"step", "epoch", "loss", "wall", "lr"}  # what a row holds in fields of its own


@dataclass(frozen=True)
class Evaluation:
    """Describes one evaluation on held-out data: a row of `Run.evaluations`."""

    step: int  # steps that were done before
    epoch: int
    loss: float
    metrics: Mapping[str, float]  # the task's metrics by name
    seconds: float
    samples: int

    @classmethod
    def from_record(cls, record: EvaluationRecord) -> Evaluation:
        """Return the evaluation that a rank's record describes."""
        return cls(record.step, record.epoch, record.loss, record.metrics, record.seconds, record.samples)


Row = TypeVar("Row", bound=Step | Evaluation)


class Table(Sequence[Row], Generic[Row]):
    """Holds rows in the order of their steps; each metric has a column of its own.

    A table is a sequence of rows, and prints as a table, in notebooks too.
    """

    def __init__(self, rows: Sequence[Row], kind: type[Row]) -> None:
        self._rows, self._kind = tuple(rows), kind

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns."""
        metrics = dict.fromkeys(name for row in self._rows for name in row.metrics)
        names = [one.name for one in fields(self._kind) if one.name != "measured"]
        place = names.index("metrics")
        return (*names[:place], *metrics, *names[place + 1 :])

    def column(self, name: str) -> list[Any]:
        """Return the values of a column; None where a row lacks the metric. Raises KeyError for an unknown column.

        Whatever else was measured in each step is a column, too, such as "compute" or "gradient_norm".
        """
        if name not in self.columns and not any(name in row.measured for row in self._rows if isinstance(row, Step)):
            raise KeyError(f"{name!r} is not a column; there are {', '.join(self.columns)}")
        return [_cell(row, name) for row in self._rows]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a `pandas.DataFrame` with the same columns. Raises MissingPackage without pandas."""
        from importlib.util import find_spec

        if find_spec("pandas") is None:
            raise MissingPackage("to_pandas needs pandas, which is not installed: pip install pandas")
        import pandas

        return pandas.DataFrame({name: self.column(name) for name in self.columns})

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Table[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Table[Row]:
        return Table(self._rows[index], self._kind) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        if not self._rows:
            return f"(no {self._kind.__name__.lower()}s)"
        cells = [list(self.columns), *([_text(_cell(row, name)) for name in self.columns] for row in self._shown())]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in cells]
        if len(self._rows) > _SHOWN:
            lines.append(f"(the last {_SHOWN} of {len(self._rows):,} rows)")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        import html

        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        rows = (
            "".join(f"<td>{html.escape(_text(_cell(row, name)))}</td>" for name in self.columns)
            for row in self._shown()
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        note = f"<p>the last {_SHOWN} of {len(self._rows):,} rows</p>" if len(self._rows) > _SHOWN else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"

    def _shown(self) -> Sequence[Row]:
        return self._rows[-_SHOWN:]


def read_run(folder: Path) -> tuple[RunInfo | None, Table[Step], Table[Evaluation]]:
    """Return what the ranks of a run recorded: the newest description of the run, its steps and its evaluations.

    Every step counts once: where it was done again after a loss, as it was done last, and as the process recorded it
    that was rank 0 then. What no rank 0 recorded here is as any rank did. Raises HorizonError.
    """
    records = lead_records(folder)
    steps = [Step.from_record(one) for one in records if isinstance(one, StepRecord)]
    evaluations = [Evaluation.from_record(one) for one in records if isinstance(one, EvaluationRecord)]
    return (
        next((one for one in reversed(records) if isinstance(one, RunInfo)), None),
        Table(sorted(steps, key=lambda one: one.step), Step),
        Table(sorted(evaluations, key=lambda one: one.step), Evaluation),
    )


def _cell(row: Step | Evaluation, name: str) -> Any:
    found = {**getattr(row, "measured", {}), **row.metrics}
    return getattr(row, name, None) if name not in found else found[name]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else f"{value:,}"


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
    def _records(self) -> tuple[RunInfo, Table[Step], Table[Evaluation]]:
        """Return what the ranks have recorded. Raises HorizonError."""
        about, steps, evaluations = read_run(self.folder)
        if about is None:
            raise HorizonError(f"{self.folder} has no records of a run (rank-*.jsonl)")
        return about, steps, evaluations

    @property
    def job(self) -> Job:
        """Return the job, with all its fields."""
        if self._job is None:
            self._job = Job.model_validate(self._records[0].to_json()["job"])
        return self._job

    @property
    def plan(self) -> Plan:
        """Return the plan that the ranks trained by last."""
        return Plan.from_json(self._records[0].to_json()["plan"])

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
        from horizonml.api.exports.trained import load_trained

        with in_this_process():
            return load_trained(self.checkpoint(best), job=self.installed(), average=average).module

    def checkpoint(self, best: bool = False) -> Path:
        """Return the folder of the newest intact checkpoint, or of the best one. Raises HorizonError."""
        from horizonml.state.saver import find_best
        from horizonml.state.shards import find

        return (find_best if best else find)(self.folder)[0]

    def report(self, page: str | os.PathLike[str] | None = None) -> Path:
        """Write the report of `horizonml report` on one HTML page, by default into the run's folder; return its path.

        Raises HorizonError; matplotlib has to be installed.
        """
        from horizonml.machine.code import require
        from horizonml.report.bench.report import write_report

        require("matplotlib", "Run.report")
        return write_report(self.folder, Path(page) if page is not None else None)[0]

    def installed(self) -> Job | None:
        """Let jobs find the objects that this run was given, and return its job if it is known."""
        self._given.install()
        return self._job

    def _repr_html_(self) -> str:
        import html

        from horizonml.api.notebook import picture

        held_out = [(one.step, one.loss) for one in self.evaluations]
        curves = [("training", "#1f77b4", [(one.step, one.loss) for one in self.history])]
        curves += [("held-out", "#d62728", held_out)] if held_out else []
        return f"<p>{html.escape(repr(self))}</p>{picture(curves)}"

    def __repr__(self) -> str:
        about, steps, _ = self._records
        parts = [f"{len(steps):,} steps", *(f"held-out {name} {value:.4g}" for name, value in self.metrics.items())]
        return f"Run({str(self.folder)!r}: {about.job.name if about.job else self.folder.name}, {', '.join(parts)})"
