"""Explains what a plan leaves to the run, as only the devices can tell: threads, compiling, and precision."""

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
        text = f"When the run begins, each device tries with how many threads{most} its ranks compute fastest."
        yield Reason("threads", "tried", text, brief=False)
    if job.compile == "never":
        yield Reason("compile", "never", "No layers are compiled (compile: never).", brief=False)
    else:
        text = "When the run begins, each device tries whether compiling the layers repays its time within the run."
        yield Reason("compile", "tried", text, brief=False)
    if job.precision == "auto" and untried is not None:
        yield Reason("precision", "fp32", f"precision: auto: the layers are computed in fp32, as {untried}.")
    elif job.precision == "auto":
        text = (
            "precision: auto: this plan is for fp32. On a warm-up, the run tries bf16 where that is faster, and uses "
            "it if the held-out loss stays as good."
        )
        yield Reason("precision", "tried", text)
