"""Defines the part of a job that says what is learned."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, model_validator

from horizonml.spec.base import Code, Spec
from horizonml.text import nearest

TASKS = {  # a task's name: its class, whose `of(info, **options)`, if it has one, makes it for the data
    "classification": "horizonml.tasks.classification:Classification",
    "multi_label": "horizonml.tasks.classification:MultiLabel",
    "regression": "horizonml.tasks.regression:Regression",
    "segmentation": "horizonml.tasks.segmentation:Segmentation",
    "language_model": "horizonml.tasks.language_model:LanguageModel",
}


class TaskSpec(Spec):
    """Configures what is learned; `task: NAME` is short for `task: {name: NAME}`."""

    name: Annotated[str, Code()] = Field(
        "auto",
        description="auto chooses the task that fits the data. classification predicts one of several classes "
        "(cross-entropy); multi_label, any number of labels (binary cross-entropy); regression, numbers (mean squared "
        "error); segmentation, a class for each pixel; language_model, the next token. `module:Class` is a task of "
        "your own (see docs/extending.md), which is code that is imported and run.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for the task's constructor.")

    @model_validator(mode="after")
    def _known(self) -> TaskSpec:
        if self.name not in ("auto", *TASKS) and not re.fullmatch(r"[\w.]+:[\w.]+", self.name):
            raise ValueError(f"name: {self.name!r} is not a known task{nearest(self.name, TASKS)}")
        return self
