"""Finds out what the workers are doing from the metrics that they serve, as rows of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum, auto

from prometheus_client.parser import text_string_to_metric_families

from horizonml.kube.diagnosis import Condition, PodState
from horizonml.text import human_bytes

PHASES = ("compute", "transfer", "wait")
Samples = dict[str, float]


class Activity(Enum):
    """What a rank is doing, as far as its metrics show."""

    UNKNOWN = auto()  # it does not answer
    STARTING = auto()
    WAITING = auto()  # for other ranks
    TRAINING = auto()
    COMPLETE = auto()


@dataclass(frozen=True)
class RankStatus:
    """The state of one rank. None stands for what is not known, or not known yet."""

    rank: int
    node: str | None
    phase: str  # for people
    stage: str | None = None
    layers: str | None = None
    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    steps: int | None = None
    samples_per_second: float | None = None
    loss: float | None = None
    compute: float | None = None  # shares of the time between two looks, else since the start
    transfer: float | None = None
    wait: float | None = None
    generation: int | None = None
    plan_memory: float | None = None  # bytes that an automatic plan expects the rank to need
    activity: Activity = Activity.UNKNOWN

    def to_json(self) -> dict[str, str | int | float | None]:
        """Return plain JSON values."""
        values = asdict(self)
        del values["activity"]  # which is the phase, for programs
        return values


def parse(text: str) -> Samples:
    """Return the values of metrics by `name` or `name{key=value}`, without the label `rank`."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "rank")
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def rank_status(
    rank: int, node: str | None, condition: Condition, before: Samples, after: Samples, seconds: float
) -> RankStatus:
    """Return a rank's row from its metrics at two times, `seconds` apart, which are empty where it did not answer."""
    if not after:
        return RankStatus(rank, node, condition.phase)
    activity, phase = _activity(condition, after)
    compute, transfer, wait = _split(before, after)

    def whole(name: str) -> int | None:
        value = after.get(f"horizonml_{name}")
        return None if value is None else int(value)

    return RankStatus(
        rank,
        node,
        phase,
        stage=next(iter(_labels(after, "horizonml_stage_info", "stage")), None),
        layers=next(iter(_labels(after, "horizonml_stage_info", "layers")), None),
        epoch=whole("epoch"),
        epochs=whole("epochs_planned"),
        step=whole("step"),
        steps=whole("steps_planned"),
        samples_per_second=_rate(before, after, seconds),
        loss=after.get("horizonml_training_loss"),
        compute=compute,
        transfer=transfer,
        wait=wait,
        generation=whole("generation"),
        plan_memory=after.get("horizonml_plan_memory_bytes"),
        activity=activity,
    )


def _activity(condition: Condition, metrics: Samples) -> tuple[Activity, str]:
    """Return what a rank is doing, and that in words."""
    if metrics.get("horizonml_complete") == 1:
        return Activity.COMPLETE, "Complete"
    if condition.state is PodState.READY:
        return Activity.TRAINING, "Training"
    if condition.state is not PodState.RUNNING:
        return Activity.UNKNOWN, condition.phase
    missing = sorted(_labels(metrics, "horizonml_waiting_for_rank", "peer"), key=int)
    if missing:
        return Activity.WAITING, f"Waits for rank {', '.join(missing)}"
    return Activity.STARTING, "Starting"


def problems(rows: Iterable[RankStatus], conditions: Mapping[int, Condition]) -> list[str]:
    """Return what is wrong, one line each, with what to do about it once, at the last line that it is for."""
    rows = list(rows)
    planned = {entry.rank: entry.plan_memory for entry in rows}
    wrong = [(rank, entry.problem, entry.fix) for rank, entry in sorted(conditions.items()) if entry.problem]
    last = {fix: rank for rank, _, fix in wrong}
    found = []
    for rank, problem, fix in wrong:
        expected = planned.get(rank) if fix is not None else None
        needs = f"; the plan expects it to need {human_bytes(expected)}" if expected is not None else ""
        found.append(problem + needs + (f"; {fix}" if fix is not None and last[fix] == rank else ""))
    generations = {entry.generation for entry in rows if entry.activity is Activity.TRAINING}
    if len(generations) > 1:
        found.append(f"ranks are in different generations {sorted(map(str, generations))}: they are just forming again")
    return found


def _labels(samples: Samples, metric: str, label: str) -> list[str]:
    """Return the values of a label among the samples of a metric."""
    found = []
    for name in samples:
        base, _, labels = name.partition("{")
        if base == metric:
            pairs = [pair.partition("=") for pair in labels.rstrip("}").split(",")]
            found += [value for key, _, value in pairs if key == label]
    return found


def _rate(before: Samples, after: Samples, seconds: float) -> float | None:
    """Return the samples per second between two times, if they are known."""
    name = "horizonml_rank_samples_total"  # the other counter moves at the first stage alone
    if name not in before or name not in after or seconds <= 0 or after[name] < before[name]:
        return None
    return (after[name] - before[name]) / seconds


def _split(before: Samples, after: Samples) -> list[float | None]:
    """Return the shares of compute, transfer and wait, of all steps so far if none ended between the two times."""
    names = [f"horizonml_step_phase_seconds_sum{{phase={phase}}}" for phase in PHASES]
    recent = [after.get(name, 0.0) - before.get(name, 0.0) for name in names]
    for parts in (recent, [after.get(name, 0.0) for name in names]):
        if min(parts) >= 0 and sum(parts) > 0:
            return [part / sum(parts) for part in parts]
    return [None, None, None]
