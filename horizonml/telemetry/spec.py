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
