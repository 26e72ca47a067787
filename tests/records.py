"""Records for tests."""

from __future__ import annotations

import torch

from horizonml.data.dataset import DataInfo, TensorSpec
from horizonml.job.schema import Job
from horizonml.machine.host import MachineInfo
from horizonml.plan.plan import Plan
from horizonml.telemetry.run_info import JobFacts, PlanFacts, RunInfo


def run_info(job: Job, plan: Plan, rank: int) -> RunInfo:
    """Return how a rank of a job is described at the beginning of its file."""
    return RunInfo(
        rank=rank,
        started_as_rank=rank,
        world_size=plan.world_size,
        generation=0,
        host="here",
        node="here",
        job=JobFacts.model_validate(job.model_dump()),
        layers=[],
        rss_idle_bytes=1,
        threads=1,
        cores=1.0,
        memory=1e9,
        machine=MachineInfo("a test's"),
        versions={"horizonml": "1", "torch": "2"},
        plan=PlanFacts.model_validate(plan.to_json()),
    )


def image_info(classes: int, shape: tuple[int, int, int], train: int, held_out: int) -> DataInfo:
    """Return the description of a set of labelled images."""
    return DataInfo(train, held_out, (TensorSpec(shape),), (), classes, TensorSpec((), torch.int64))
