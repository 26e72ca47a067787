"""Describes the best evaluation so far, by one metric: part of every checkpoint, and of what ranks tell one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

KEPT = "keep_best"  # for the checkpoint that is never deleted
STOPPING = "early_stop"  # for the decision to end a training early


class Best(BaseModel):
    """Holds the best value of a metric, and when it was measured."""

    model_config = ConfigDict(strict=True, frozen=True)

    metric: str
    value: float | int
    step: int = Field(ge=0)  # the number of steps that had been done
    waited: int = Field(0, ge=0)  # evaluations since then


def best_from(value: Any) -> dict[str, Best]:
    """Return what a peer reports as its best evaluations, by purpose; nothing if it is malformed."""
    if not isinstance(value, Mapping):
        return {}
    try:
        return {str(purpose): Best.model_validate(one) for purpose, one in value.items()}
    except ValidationError:
        return {}
