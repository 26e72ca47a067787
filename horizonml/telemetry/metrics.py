"""Every Prometheus metric, once: its name, its meaning, and when it changes.

Names follow Prometheus' conventions (base units, `_total`, `_ratio`, `_info`). All carry one label `rank`, the rank
that the process was given at its start. `docs/metrics.md` is made from this module.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from horizonml.engine.clock import KINDS
from horizonml.engine.step import Step
from horizonml.engine.step import Way as Direction
from horizonml.machine.resources import available_cores, memory_limit, memory_used, throttled_seconds
from horizonml.machine.usage import cpu_seconds, rss_bytes
from horizonml.telemetry.record import EvaluationRecord, StepRecord

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_DIRECTIONS: tuple[Direction, ...] = ("previous", "next", "members")
_M = TypeVar("_M", bound=MetricWrapperBase)


_HEAD = """\
# Metrics

What every rank shows at `/metrics`. Made from `horizonml/telemetry/metrics.py` by `make generate`; change it there.
All carry the label `rank`: the rank that the process was given at its start. A gauge without a value yet (no epoch
evaluated, no checkpoint saved) is not shown.

| metric | type | further labels | meaning |
|---|---|---|---|"""
_FOOT = """
A histogram `x` has the series `x_bucket` (label `le`), `x_sum` and `x_count`. `phase` is `compute`, `transfer` or
`wait`; `direction` is `previous` (the stage before), `next` (the stage after) or `members` (of the same stage).
"""


class Metrics(Collector):
    """One rank's metrics, in a registry of its own."""

    def __init__(self, rank: int, root: Path = Path("/sys/fs/cgroup")) -> None:
        """`rank` is what this process was given at its start; `root` is where its cgroup is mounted."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.rank, self.registry = str(rank), CollectorRegistry()
        self.labels: dict[str, tuple[str, ...]] = {}  # the further labels of each metric
        registry = self.registry
        self._newest: StepRecord | None = None
        registry.register(self)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            self.labels[f"horizonml_{name}"] = labels
            return Gauge(f"horizonml_{name}", text, ("rank", *labels), registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            self.labels[f"horizonml_{name}"] = labels
            return Counter(f"horizonml_{name}_total", text, ("rank", *labels), registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            self.labels[f"horizonml_{name}"] = labels
            return Histogram(f"horizonml_{name}", text, ("rank", *labels), registry=registry, buckets=_SECONDS)

        # The run and the group.
        self._run_info = gauge(
            "run_info", "What is trained; always 1.", "name", "model", "data", "strategy", "version", "torch"
        )
        self._stage_info = gauge(
            "stage_info", "The rank's place in the plan; always 1.", "stage", "member", "stages", "layers", "node"
        )
        self._plan_info = gauge(
            "plan_info", "The plan; always 1.", "schedule", "micro_batches", "ranks", "cuts", "send"
        )
        self._forecast = gauge("plan_step_seconds", "A step's time as the automatic plan predicts it.")
        self._slowdown = gauge(
            "slowdown_ratio", "The rank's computing over what was planned, compared with the others' (1: as planned)."
        )
        self._ready = gauge("ready", "1 while the rank is in a formed group, or has completed its job.")
        self._complete = gauge("complete", "1 when the job is trained to its end.")
        self._generation = gauge("generation", "Generation of the group: counts its formations.")
        self._world_size = gauge("world_size", "Ranks in the formed group; 0 while there is none.")
        self._wanted = gauge("world_size_wanted", "Ranks that the job was started with.")
        self._waiting = gauge("waiting_for_rank", "1 for each rank whose arrival this rank waits for.", "peer")
        self._lost = self._own(counter("peers_lost", "How often the group broke because a rank was lost."))

        # Progress.
        self._step = gauge("step", "Steps of the run that are done, those before a resumption included.")
        self._steps_planned = gauge("steps_planned", "Steps of the whole run.")
        self._epoch = gauge("epoch", "The epoch under way, from 1.")
        self._epochs_planned = gauge("epochs_planned", "Epochs of the whole run.")
        self._last_step = gauge("last_step_timestamp_seconds", "When the newest step ended.")
        self._samples = self._own(
            counter(
                "samples",
                "Samples that entered the first stage at this rank; their sum over ranks is what was trained on.",
            )
        )
        self._joules = counter("energy_joules", "Energy used by the rank's machine in steps, where it tells it.")
        self._rows = self._own(counter("rank_samples", "Samples that went through this rank's stage here."))
        self._loss = gauge("training_loss", "Loss of the newest global batch.")
        self._accuracy = gauge("training_accuracy_ratio", "Accuracy on the newest global batch.")
        self._held_out_loss = gauge("held_out_loss", "Loss on held-out data after the newest epoch.")
        self._held_out_accuracy = gauge("held_out_accuracy_ratio", "Accuracy on held-out data after the newest epoch.")
        self._lr = gauge("learning_rate", "Learning rate of the newest step.")
        self._epoch_seconds = gauge("epoch_duration_seconds", "Time of the newest epoch's training steps.")
        self._evaluation_seconds = gauge("evaluation_duration_seconds", "Time of the newest evaluation.")

        # Where the time goes.
        self._duration = self._own(histogram("step_duration_seconds", "Wall time of a step."))
        phases = histogram(
            "step_phase_seconds", "A step's wall time split into compute, transfer and wait, which add up.", "phase"
        )
        self._phases = [phases.labels(self.rank, kind) for kind in KINDS]
        self._bubble = gauge(
            "bubble_ratio", "Share of the newest step in which the rank waited for others: the pipeline's bubble."
        )
        self._divergence = gauge(
            "gradient_divergence",
            "Distance of this rank's gradient before the reduction to the mean, relative to the mean.",
        )
        sent = counter("sent_bytes", "Bytes sent to ranks of a neighbouring stage, or of this one.", "direction")
        received = counter("received_bytes", "Bytes received, likewise.", "direction")
        self._traffic = [
            (direction, sent.labels(self.rank, direction), received.labels(self.rank, direction))
            for direction in _DIRECTIONS
        ]

        # Checkpoints.
        self._saved = self._own(counter("checkpoints", "Checkpoints saved."))
        self._save_failures = self._own(counter("checkpoint_failures", "Checkpoints that could not be saved."))
        self._saved_at = gauge("checkpoint_timestamp_seconds", "When the newest checkpoint was saved.")
        self._saved_step = gauge("checkpoint_step", "Step of the newest checkpoint.")
        self._save_seconds = gauge("checkpoint_duration_seconds", "How long the newest checkpoint took.")

        registry.register(Device(self.rank, root))
        self._epoch_so_far = 0.0
        self.unready: str | None = "starting"  # why the rank is not ready, or None
        for zero in (self._ready, self._complete, self._generation, self._world_size):
            self._put(zero, 0)

    def _own(self, metric: _M) -> _M:
        """The metric's only child, this rank's, which counts from 0."""
        return metric.labels(self.rank)

    def _put(self, gauge: Gauge, value: float) -> None:
        """Set a gauge, which shows nothing before its first value."""
        gauge.labels(self.rank).set(value)

    def wanted(self, world_size: int) -> None:
        """The process has started as one of `world_size` ranks."""
        self._put(self._wanted, world_size)

    def waiting(self, ranks: Iterable[int]) -> None:
        """Not in a group: these ranks are missing."""
        missing = sorted(ranks)
        self.unready = (
            f"waiting for rank {', '.join(map(str, missing))}" if missing else "waiting for the group to form"
        )
        self._put(self._ready, 0)
        self._put(self._world_size, 0)
        self._waiting.clear()
        for rank in missing:
            self._waiting.labels(self.rank, str(rank)).set(1)

    def formed(self, generation: int, world_size: int) -> None:
        """In a group."""
        self.unready = None
        self._waiting.clear()
        self._put(self._generation, generation)
        self._put(self._world_size, world_size)
        self._put(self._ready, 1)

    def started(self, about: dict[str, Any], epochs: int, steps: int, done: int) -> None:
        """Training begins or goes on; `about` is the first record of the rank's file (see `worker`)."""
        job, versions = about["job"], about["versions"]
        self._run_info.clear()
        self._run_info.labels(
            self.rank,
            job["name"],
            job["model"]["name"],
            job["data"]["name"],
            "explicit" if job["parallel"]["stages"] else job["parallel"]["strategy"],
            versions["horizonml"],
            versions["torch"],
        ).set(1)
        stages = about["plan"]["stages"]
        stage = stages[about["stage"]]
        self._stage_info.clear()
        self._stage_info.labels(
            self.rank,
            str(about["stage"]),
            str(stage["ranks"].index(about["rank"])),
            str(len(stages)),
            f"{stage['start']}-{stage['stop'] - 1}",
            about["host"],
        ).set(1)
        self._plan_info.clear()
        self._plan_info.labels(
            self.rank,
            about["plan"]["schedule"],
            str(about["plan"]["micro_batches"]),
            "|".join(",".join(map(str, one["ranks"])) for one in stages),
            ",".join(str(one["start"]) for one in stages[1:]),
            ",".join(one["send"] for one in stages[:-1]),
        ).set(1)
        for gauge in (self._forecast, self._slowdown):
            gauge.clear()
        if about["forecast"] is not None:
            self._put(self._forecast, about["forecast"])
        self._put(self._steps_planned, steps)
        self._put(self._epochs_planned, epochs)
        self._put(self._epoch, 1 + done * epochs // steps if done < steps else epochs)
        self._newest = None
        self._put(self._step, done)
        self._put(self._last_step, time.time())
        self._epoch_so_far = 0.0

    def step(self, record: StepRecord, step: Step) -> None:
        """A step is done. Costs microseconds: what only the newest step decides is set when Prometheus asks."""
        self._newest = record
        self._samples.inc(step.entered)
        self._rows.inc(record.samples)
        if record.joules is not None:
            self._joules.labels(self.rank).inc(record.joules)
        self._duration.observe(record.wall)
        for phase, seconds in zip(self._phases, (record.compute, record.transfer, record.wait), strict=True):
            phase.observe(seconds)
        if record.divergence is not None:
            self._put(self._divergence, record.divergence)
        for direction, sent, received in self._traffic:
            out, back = step.traffic[direction]
            if out:
                sent.inc(out)
            if back:
                received.inc(back)
        self._epoch_so_far += record.wall

    def collect(self) -> Iterator[Metric]:
        """Called first when Prometheus asks: the newest step's numbers."""
        record = self._newest
        if record is not None:
            self._put(self._step, record.step)
            self._put(self._epoch, record.epoch)
            self._put(self._last_step, record.time)
            self._put(self._loss, record.loss)
            self._put(self._accuracy, record.accuracy)
            self._put(self._lr, record.lr)
            self._put(self._bubble, record.wait / record.wall if record.wall else 0.0)
        return iter(())

    def evaluation(self, record: EvaluationRecord) -> None:
        """An epoch has been evaluated."""
        self._put(self._held_out_loss, record.loss)
        self._put(self._held_out_accuracy, record.accuracy)
        self._put(self._evaluation_seconds, record.seconds)
        self._put(self._epoch_seconds, self._epoch_so_far)
        self._epoch_so_far = 0.0

    def checkpoint(self, step: int, saved: bool, seconds: float) -> None:
        """A checkpoint was saved, or could not be."""
        if not saved:
            self._save_failures.inc()
            return
        self._saved.inc()
        self._put(self._saved_at, time.time())
        self._put(self._saved_step, step)
        self._put(self._save_seconds, seconds)

    def slowdown(self, factor: float) -> None:
        """How the rank's computing compares with its plan."""
        self._put(self._slowdown, factor)

    def lost_peer(self) -> None:
        """The group broke."""
        self._lost.inc()

    def completed(self) -> None:
        """The job is trained to its end."""
        self.unready = None
        self._waiting.clear()
        self._put(self._complete, 1)
        self._put(self._ready, 1)


class Device(Collector):
    """CPU, memory and network of this process and its container, read when Prometheus asks."""

    def __init__(self, rank: str, root: Path) -> None:
        self._rank, self._root = rank, root

    def collect(self) -> Iterator[Metric]:
        """Read everything now."""
        gauges: Sequence[tuple[str, str, float | None]] = (
            ("resident_memory_bytes", "Resident memory of the process.", float(rss_bytes())),
            ("memory_used_bytes", "What counts against the container's memory limit.", memory_used(self._root)),
            (
                "memory_limit_bytes",
                "The container's memory limit, else the machine's memory.",
                memory_limit(self._root),
            ),
            ("cpu_limit_cores", "Cores that the process may use.", available_cores(self._root)),
        )
        for name, text, value in gauges:
            family = GaugeMetricFamily(f"horizonml_{name}", text, labels=["rank"])
            if value is not None:
                family.add_metric([self._rank], value)
            yield family
        network = psutil.net_io_counters()
        counters: Sequence[tuple[str, str, float | None]] = (
            ("cpu_seconds", "CPU time of the process, over all its threads.", cpu_seconds()),
            (
                "cpu_throttled_seconds",
                "Time for which the container's CPU quota held it up.",
                throttled_seconds(self._root),
            ),
            ("network_sent_bytes", "Bytes sent by all interfaces of the container.", network.bytes_sent),
            ("network_received_bytes", "Bytes received by all interfaces of the container.", network.bytes_recv),
        )
        for name, text, value in counters:
            total = CounterMetricFamily(f"horizonml_{name}", text, labels=["rank"])
            if value is not None:
                total.add_metric([self._rank], value)
            yield total


def document() -> str:
    """`docs/metrics.md`."""
    metrics = Metrics(0)
    lines = [_HEAD]
    for family in metrics.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        extra = ", ".join(f"`{label}`" for label in metrics.labels.get(family.name, ()))
        lines.append(f"| `{name}` | {family.type} | {extra} | {family.documentation} |")
    return "\n".join([*lines, _FOOT])
