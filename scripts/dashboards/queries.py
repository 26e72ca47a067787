"""Expressions that several panels share. Grafana fills in the variables.

One Prometheus sees many jobs, so whatever adds up or compares ranks does so within one namespace and job.
"""

from __future__ import annotations

from dashboards.panel import BLUE, GREEN, YELLOW

JOB = 'namespace=~"$namespace",job=~"$job"'
WHO = f'{JOB},rank=~"$rank"'
BY = "namespace, job"
PHASES = {"compute": GREEN, "transfer": YELLOW, "wait": BLUE}
PHASE_SECONDS = f"horizonml_step_phase_seconds_sum{{{WHO}}}"


def each(metric: str) -> str:
    """The value of each rank."""
    return f"{metric}{{{WHO}}}"


def rate(metric: str, labels: str = WHO) -> str:
    """How fast each rank's counter grows, per second."""
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def most(metric: str) -> str:
    """The largest value among the ranks of each job."""
    return f"max by ({BY}) ({metric}{{{JOB}}})"


def least(metric: str) -> str:
    """The smallest value among the ranks of each job."""
    return f"min by ({BY}) ({metric}{{{JOB}}})"


def grown(metric: str, window: str, labels: str = JOB) -> str:
    """How much each series has grown in a time, where a series may begin with what it counts first.

    increase() alone would miss that, and with it the first loss, before which the histograms of losses have no series.
    """
    series = f"{metric}{{{labels}}}"
    return f"({series} unless {series} offset {window} or increase({series}[{window}]))"


def _phase(phase: str, part: str) -> str:
    return rate(f"horizonml_step_phase_seconds_{part}", f'{WHO},phase="{phase}"')


def per_step(phase: str) -> str:
    """Each rank's seconds per step in a phase."""
    return f"{_phase(phase, 'sum')} / {_phase(phase, 'count')}"


def share(phase: str) -> str:
    """Each rank's share of its time in a phase."""
    return f"{_phase(phase, 'sum')} / ignoring(phase) {rate('horizonml_step_duration_seconds_sum')}"


def quantile(of: float) -> str:
    """A quantile of the step times of each job's ranks."""
    buckets = rate("horizonml_step_duration_seconds_bucket")
    return f"histogram_quantile({of}, sum by ({BY}, le) ({buckets})) > 0"  # not a number before the first step


AGE = f"time() - {most('horizonml_checkpoint_timestamp_seconds')}"
SAMPLES = f"sum by ({BY}) ({rate('horizonml_samples_total', JOB)})"  # per second, of all ranks of a job
