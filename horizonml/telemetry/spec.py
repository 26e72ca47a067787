"""Defines the part of a job that says what is recorded while it trains."""

from __future__ import annotations

from pydantic import Field

from horizonml.spec.base import Spec


class TelemetrySpec(Spec):
    """Configures what is recorded while training."""

    divergence_every: int = Field(
        20, ge=0, description="Steps between two measurements of gradient divergence (0: never)."
    )
    timeline_every: int = Field(50, ge=0, description="Steps between two recorded timelines of a step (0: never).")
    tensorboard: bool = Field(
        False,
        description="Whether rank 0 also writes TensorBoard's event files, into the folder tensorboard in that of the "
        "run, while it trains (needs horizonml[tensorboard]).",
    )
    mlflow: str | None = Field(
        None,
        min_length=1,
        description="Where rank 0 also logs to MLflow while it trains: the URI of a server, or a folder, in which a "
        "database mlflow.db is kept (needs horizonml[mlflow]). Give a server's password by MLflow's own environment "
        "variables and not here, because jobs are recorded.",
    )
