"""What the workers are doing, from what they show at /metrics, as rows of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from horizonml.kube.diagnosis import Condition

PHASES = ("compute", "transfer", "wait")
Samples = dict[str, float]


@dataclass(frozen=True)
class Row:
    """One rank. None: not known (yet)."""

    rank: int
    node: str | None
    phase: str
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

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def parse(text: str) -> Samples:
    """`name` or `name{key=value}` -> value, without the label `rank`; info metrics by their labels."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "rank")
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def row(rank: int, node: str | None, condition: Condition, before: Samples, after: Samples, seconds: float) -> Row:
    """A rank's row, from two looks at its metrics `seconds` apart; empty where it did not answer."""
    phase = condition.phase
    if not after:
        return Row(rank, node, phase)
    if after.get("horizonml_complete") == 1:
        phase = "Complete"
    elif phase == "Ready":
        phase = "Training"
    elif phase == "Running":
        missing = sorted(_labels(after, "horizonml_waiting_for_rank", "peer"), key=int)
        phase = f"Waits for rank {', '.join(missing)}" if missing else "Starting"
    compute, transfer, wait = _split(before, after)

    def whole(name: str) -> int | None:
        value = after.get(f"horizonml_{name}")
        return None if value is None else int(value)

    return Row(
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
    )


def problems(rows: Iterable[Row], conditions: Mapping[int, Condition]) -> list[str]:
    """What is wrong, one line each."""
    found = [entry.problem for _, entry in sorted(conditions.items()) if entry.problem]
    generations = {entry.generation for entry in rows if entry.phase == "Training"}
    if len(generations) > 1:
        found.append(f"ranks are in different generations {sorted(map(str, generations))}: they are just forming again")
    return found


def _labels(samples: Samples, metric: str, label: str) -> list[str]:
    found = []
    for name in samples:
        base, _, labels = name.partition("{")
        if base == metric:
            pairs = [pair.partition("=") for pair in labels.rstrip("}").split(",")]
            found += [value for key, _, value in pairs if key == label]
    return found


def _rate(before: Samples, after: Samples, seconds: float) -> float | None:
    name = "horizonml_rank_samples_total"  # the other counts a sample once, at the first stage
    if name not in before or name not in after or seconds <= 0 or after[name] < before[name]:
        return None
    return (after[name] - before[name]) / seconds


def _split(before: Samples, after: Samples) -> list[float | None]:
    """Shares of compute, transfer and wait; of all steps so far if none ended between the two looks."""
    names = [f"horizonml_step_phase_seconds_sum{{phase={phase}}}" for phase in PHASES]
    recent = [after.get(name, 0.0) - before.get(name, 0.0) for name in names]
    for parts in (recent, [after.get(name, 0.0) for name in names]):
        if min(parts) >= 0 and sum(parts) > 0:
            return [part / sum(parts) for part in parts]
    return [None, None, None]
