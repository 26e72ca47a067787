"""Explains what a plan leaves to the run, as only the devices can measure: threads and precision."""

from __future__ import annotations

from collections.abc import Iterator

from horizonml.job.schema import Job
from horizonml.planner.reasons import Reason
from horizonml.text import count


def run_reasons(job: Job, threads: int | None, untried: str | None) -> Iterator[Reason]:
    """Yield what a run decides when it begins.

    `threads` are the most that a rank of this machine has cores for, None for devices on paper; `untried` says why a
    run of the job is not able to try what changes accuracy, if it is not.
    """
    own = job.parallel.threads
    if own is not None:
        yield Reason(
            "threads", str(own), f"Each rank computes with {count(own, 'thread')}, as the job says.", brief=False
        )
    elif threads == 1:
        yield Reason("threads", "1", "Each rank computes with one thread, because it has only one core.", brief=False)
    else:
        most = f" (1 to {threads})" if threads is not None else ""
        text = f"When the run begins, each device measures how many threads{most} make its ranks fastest."
        yield Reason("threads", "tried", text, brief=False)
    if job.precision == "auto" and untried is not None:
        text = f"With precision: auto, this run computes all layers in fp32, because {untried}."
        yield Reason("precision", "fp32", text)
    elif job.precision == "auto":
        text = (
            "With precision: auto, this plan is for fp32. The run tries bf16 on a warm-up, on devices where it is "
            "faster, and uses it if held-out accuracy does not suffer."
        )
        yield Reason("precision", "tried", text)
