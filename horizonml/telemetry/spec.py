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
        description="Whether rank 0 also writes TensorBoard event files while it trains, to the folder tensorboard "
        "inside the run's folder (needs `pip install 'horizonml[tensorboard]'`).",
    )
    mlflow: str | None = Field(
        None,
        min_length=1,
        description="Where rank 0 also logs to MLflow while it trains: the URI of a server, or a folder for a "
        "database, mlflow.db (needs `pip install 'horizonml[mlflow]'`). Give a server's password in MLflow's own "
        "environment variables and not here, because jobs are recorded.",
    )
