"""What `horizonml plan` says of the choices that a run makes when it begins."""

from __future__ import annotations

from typing import Any

from horizonml.job.jobfile import from_values
from horizonml.planner.explain import run_reasons


def test_what_the_run_decides_is_said() -> None:
    auto, short = {"precision": "auto"}, "a run of 5 steps is too short to try it"
    cases: list[tuple[dict[str, Any], int | None, str | None, str]] = [
        ({"parallel": {"threads": 3}}, 4, None, "Each rank computes with 3 threads, as the job says."),
        ({}, 1, None, "Each rank computes with one thread, because it has only one core."),
        ({}, 4, None, "each device measures how many threads (1 to 4) make its ranks fastest."),
        ({}, None, None, "each device measures how many threads make its ranks fastest."),
        (auto, 1, None, "With precision: auto, this plan is for fp32: the run tries bf16 on a warm-up"),
        (auto, 1, short, "all layers run in fp32, because a run of 5 steps is too short"),
    ]
    for values, threads, untried, said in cases:
        told = [reason.text for reason in run_reasons(from_values({"name": "job", **values}, "job"), threads, untried)]
        assert [text for text in told if said in text]
        assert len(told) == 1 + ("precision" in values)
