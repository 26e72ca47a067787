"""Expressions that several panels share. Grafana fills in the variables."""

from __future__ import annotations

from dashboards.panel import BLUE, GREEN, YELLOW

WHO = 'namespace=~"$namespace",rank=~"$rank"'
JOB = 'namespace=~"$namespace"'
PHASES = {"compute": GREEN, "transfer": YELLOW, "wait": BLUE}
PHASE_SECONDS = f"horizonml_step_phase_seconds_sum{{{WHO}}}"


def each(metric: str) -> str:
    """The value of each rank."""
    return f"{metric}{{{WHO}}}"


def rate(metric: str, labels: str = WHO) -> str:
    """How fast each rank's counter grows, per second."""
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def most(metric: str) -> str:
    """The largest value among all ranks."""
    return f"max({metric}{{{JOB}}})"


def _phase(phase: str, part: str) -> str:
    return rate(f"horizonml_step_phase_seconds_{part}", f'{WHO},phase="{phase}"')


def per_step(phase: str) -> str:
    """Each rank's seconds per step in a phase."""
    return f"{_phase(phase, 'sum')} / {_phase(phase, 'count')}"


def share(phase: str) -> str:
    """Each rank's share of its time in a phase."""
    return f"{_phase(phase, 'sum')} / ignoring(phase) {rate('horizonml_step_duration_seconds_sum')}"


def quantile(of: float) -> str:
    """A quantile of all ranks' step times."""
    buckets = rate("horizonml_step_duration_seconds_bucket")
    return f"histogram_quantile({of}, sum by (le) ({buckets})) > 0"  # not a number before the first step


AGE = f"time() - {most('horizonml_checkpoint_timestamp_seconds')}"
SAMPLES = f"sum({rate('horizonml_samples_total', JOB)})"  # per second, of all ranks
