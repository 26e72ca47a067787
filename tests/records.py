"""Records for tests."""

from __future__ import annotations

from horizonml.job.schema import Job
from horizonml.plan.plan import Plan
from horizonml.telemetry.record import RunInfo


def run_info(job: Job, plan: Plan, rank: int) -> RunInfo:
    """Return how a rank of a job is described at the beginning of its file."""
    return RunInfo(
        rank=rank,
        started_as_rank=rank,
        world_size=plan.world_size,
        generation=0,
        host="here",
        node="here",
        job=job,
        layers=[],
        rss_idle_bytes=1,
        threads=1,
        cores=1.0,
        memory=1e9,
        machine={"processor": "a test's"},
        versions={"horizonml": "1", "torch": "2"},
        plan=plan,
    )
