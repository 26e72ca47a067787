"""The command that shows a recorded run in other tools: `horizonml log`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def log(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder (runs/NAME).", show_default=False)],
    tensorboard: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write TensorBoard event files to FOLDER/NAME, which must not contain any yet.",
            show_default=False,
        ),
    ] = None,
    mlflow: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="Log to MLflow: the URI of a server, or a folder for a database. If part of the run was logged there "
            "before, the rest is added.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Log a recorded run to TensorBoard or MLflow.

    A job with telemetry.tensorboard or telemetry.mlflow logs while it trains. Use this command for a run that did not,
    or to add what could not be delivered then, for example because the server was down. The run's own records are not
    changed.
    """
    from horizonml.errors import HorizonError, JobError
    from horizonml.report.lead import lead_records
    from horizonml.telemetry.scalars import Scalars
    from horizonml.telemetry.sinks import Sink, deliver, open_mlflow, open_tensorboard

    if tensorboard is None and mlflow is None:
        raise JobError("say where to log the run: --tensorboard FOLDER, --mlflow URI, or both")
    records, sinks = lead_records(run), list[tuple[str, Sink]]()
    if tensorboard is not None:
        folder = tensorboard / run.absolute().name
        if any(folder.glob("events.out.tfevents.*")):
            raise JobError(f"--tensorboard: {folder} has event files already; delete them, or name another folder")
        sinks.append((f"TensorBoard: tensorboard --logdir {tensorboard}", open_tensorboard(folder)))
    try:
        if mlflow is not None:
            sinks.append((f"MLflow at {mlflow}", open_mlflow(mlflow, run)))
        for words, sink in sinks:
            scalars = Scalars()
            deliver(sink, scalars, records)
            sink.close(scalars.outcome)
            print(f"logged {sum(record['kind'] == 'step' for record in records):,} steps to {words}")
    except HorizonError:
        raise
    except Exception as error:  # the libraries' own errors are of many kinds
        problem = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HorizonError(f"{run} cannot be logged: {problem}") from error
