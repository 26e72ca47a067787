"""Chooses the task that a job names; so far every data set of a job holds labelled images."""

from __future__ import annotations

from horizonml.job.schema import Job
from horizonml.tasks.image_classification import ImageClassification


def task_for(job: Job) -> ImageClassification:
    """Return the task of a job."""
    return ImageClassification(job.label_smoothing)
