"""Expressions that several panels share. Grafana fills in the variables."""

from __future__ import annotations

from dashboards.panel import BLUE, GREEN, YELLOW

WHO = 'namespace=~"$namespace",rank=~"$rank"'
JOB = 'namespace=~"$namespace"'
PHASES = {"compute": GREEN, "transfer": YELLOW, "wait": BLUE}
PHASE_SECONDS = f"horizonml_step_phase_seconds_sum{{{WHO}}}"


def per_step(phase: str) -> str:
    """Each rank's seconds per step in a phase, the slowest first."""
    seconds = f'rate(horizonml_step_phase_seconds_sum{{{WHO},phase="{phase}"}}[$__rate_interval])'
    steps = f'rate(horizonml_step_phase_seconds_count{{{WHO},phase="{phase}"}}[$__rate_interval])'
    return f"sort_desc({seconds} / {steps})"


def share(phase: str) -> str:
    """Each rank's share of its time in a phase."""
    seconds = f'rate(horizonml_step_phase_seconds_sum{{{WHO},phase="{phase}"}}[$__rate_interval])'
    return f"{seconds} / ignoring(phase) rate(horizonml_step_duration_seconds_sum{{{WHO}}}[$__rate_interval])"


def quantile(of: float) -> str:
    """A quantile of all ranks' step times."""
    buckets = f"rate(horizonml_step_duration_seconds_bucket{{{WHO}}}[$__rate_interval])"
    return f"histogram_quantile({of}, sum by (le) ({buckets})) > 0"  # not a number before the first step


AGE = f"time() - max(horizonml_checkpoint_timestamp_seconds{{{JOB}}})"
