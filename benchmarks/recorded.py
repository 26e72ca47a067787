"""What the records of a benchmark's steps begin with."""

from __future__ import annotations

import torch

from horizonml.job.schema import Job
from horizonml.plan.plan import Plan
from horizonml.telemetry.run_info import JobFacts, PlanFacts, RunInfo


def described(plan: Plan) -> RunInfo:
    """Return what the records of a run begin with."""
    return RunInfo(
        rank=0,
        started_as_rank=0,
        world_size=1,
        generation=0,
        host="",
        node="",
        job=JobFacts.model_validate(Job().model_dump()),
        layers=[],
        rss_idle_bytes=0,
        threads=torch.get_num_threads(),
        cores=1.0,
        memory=0.0,
        versions={},
        plan=PlanFacts.model_validate(plan.to_json()),
    )
