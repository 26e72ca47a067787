"""Defines the parts of a job that say how often a training is evaluated, and when it ends early."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from horizonml.spec.base import Spec


class EvaluateSpec(Spec):
    """Configures how often the model is evaluated on all held-out data, which always happens after the last step."""

    every_epochs: int = Field(1, ge=1, description="Epochs between two evaluations.")
    every_steps: int | None = Field(
        None, ge=1, description="Steps between two evaluations, instead of epochs (default: by epochs)."
    )


class EarlyStopSpec(Spec):
    """Configures early stopping: the end of a training whose evaluations no longer get better."""

    patience: int | None = Field(
        None, ge=1, description="End after this many evaluations in a row without a better one (default: never)."
    )
    metric: str = Field(
        "held_out_loss", description="The metric to watch: held_out_loss, or another one that evaluations record."
    )
    min_delta: float = Field(
        0.0, ge=0, description="How much better than the best earlier value a value must be to count."
    )
    best_is: Literal["auto", "lowest", "highest"] = Field(
        "auto", description="Which value of the metric is best; auto knows it for the metrics of the built-in tasks."
    )
