"""Updates one rank's Prometheus metrics, which `record` and `table` declare.

The use of processor, memory and network by the process and its container is read when Prometheus asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from horizonml.engine.clock import StepResult
from horizonml.job.schema import Job
from horizonml.machine.accelerator import computing
from horizonml.machine.host import available_cores, cpu_seconds, memory_limit, memory_used, rss_bytes, throttled_seconds
from horizonml.plan.plan import Plan
from horizonml.telemetry.fields import MetricSpec, Record, gauge
from horizonml.telemetry.goodput import CAUSES, Cause, Goodput
from horizonml.telemetry.record import SHARES, SHOWN, EvaluationRecord, StateSource, StepRecord, metric_key
from horizonml.telemetry.run_info import RunInfo
from horizonml.telemetry.table import CONTAINER, TABLE


class Container(Collector):
    """Collects the metrics of `table.CONTAINER`."""

    def __init__(self, rank: str, root: Path) -> None:
        """Prepare to read the cgroup of the process, which is mounted at `root`."""
        self._rank, self._root = rank, root

    def _read(self) -> dict[str, float | None]:
        """Return all current values; a value is None where this system does not provide it."""
        network, compute = psutil.net_io_counters(), computing()
        told = compute.readings()
        return {
            "resident_memory_bytes": float(rss_bytes()),
            "memory_used_bytes": memory_used(self._root),
            "memory_limit_bytes": memory_limit(self._root),
            "cpu_limit_cores": available_cores(self._root),
            "cpu_seconds": cpu_seconds(),
            "cpu_throttled_seconds": throttled_seconds(self._root),
            "network_sent_bytes": network.bytes_sent,
            "network_received_bytes": network.bytes_recv,
            "accelerator_memory_bytes": compute.taken(),
            "accelerator_memory_limit_bytes": compute.memory(),
            "accelerator_temperature_celsius": told.temperature,
            "accelerator_utilization_ratio": told.utilisation,
        }

    def collect(self) -> Iterator[Metric]:
        """Read all values and yield their metrics."""
        values = self._read()
        for spec in CONTAINER:
            kind = CounterMetricFamily if spec.type == "counter" else GaugeMetricFamily
            family = kind(f"horizonml_{spec.name}", spec.meaning, labels=["rank"])
            value = values[spec.name]
            if value is not None:
                family.add_metric([self._rank], value)
            yield family


_MEASURED = {"training": "the newest global batch", "held_out": "held-out data after the newest epoch"}
_KINDS = {
    "gauge": (Gauge, "set"),
    "counter": (Counter, "inc"),
    "summary": (Summary, "observe"),
    "histogram": (Histogram, "observe"),
}


_Series = tuple[str, ...]  # a metric's name, and the values of its own labels


def _series_of(kind: type[Record]) -> dict[str, _Series]:
    shown = {name: (how.metric, how.label) for name, how in SHOWN[kind].items()}
    return {name: (spec.name, label) if label else (spec.name,) for name, (spec, label) in shown.items() if spec}


# Of a gauge that every step has, only the newest value counts, which is set when Prometheus asks.
_SPECS = {spec.name: spec for spec in TABLE}
_OF_STEP, _OF_EVALUATION = _series_of(StepRecord), _series_of(EvaluationRecord)
_NEWEST = {
    one.name: _OF_STEP[one.name]
    for one in fields(StepRecord)
    if one.name in _OF_STEP and one.default is not None and _SPECS[_OF_STEP[one.name][0]].type == "gauge"
}
_EACH = {name: series for name, series in _OF_STEP.items() if name not in _NEWEST}


class Metrics(Collector):
    """Holds one rank's metrics in a registry of its own."""

    def __init__(
        self, rank: int, root: Path = Path("/sys/fs/cgroup"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Register the metrics; `rank` is what this process was started as, and its cgroup is mounted at `root`."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.rank, self.registry = str(rank), CollectorRegistry()
        self.unready: str | None = "starting"  # why the rank is not ready, or None
        self._newest: StepRecord | None = None
        self._known: set[str] = set()  # the task's metrics that have gauges
        self._epoch_so_far = 0.0  # seconds of the epoch's steps
        self._clock, self._goodput = clock, Goodput()
        self._counted: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)  # lost seconds that the counters show
        self._carried: Callable[[], Mapping[str, float]] = dict  # what the tunnel has counted, by metric
        self._carried_before: Mapping[str, float] = {}
        self._families: dict[str, tuple[MetricWrapperBase, str]] = {}  # each with its way to take a value
        self._series: dict[_Series, Callable[[float], None]] = {}
        self.registry.register(self)
        for spec in TABLE:
            self._add(spec)
        self.registry.register(Container(self.rank, root))

    def _add(self, spec: MetricSpec) -> None:
        options = {"buckets": spec.buckets} if spec.type == "histogram" else {}
        name = f"horizonml_{spec.name}" + ("_total" if spec.type == "counter" else "")
        kind, verb = _KINDS[spec.type]
        family = kind(name, spec.meaning, ("rank", *spec.labels), registry=self.registry, **options)
        self._families[spec.name] = family, verb
        if spec.from_zero:
            family.labels(self.rank)
        for value in spec.values or ():
            family.labels(self.rank, value)

    def _put(self, name: str, value: float = 1, *labels: str) -> None:
        """Set a gauge, add to a counter, or let a histogram count a value. Series are hidden before their first one."""
        self._of((name, *labels))(value)

    def _of(self, series: _Series) -> Callable[[float], None]:
        if series not in self._series:
            family, verb = self._families[series[0]]
            self._series[series] = getattr(family.labels(self.rank, *series[1:]), verb)
        return self._series[series]

    def _show(self, record: Record, shown: Mapping[str, _Series]) -> None:
        """Let some series take the values of a record's fields."""
        for name, series in shown.items():
            value = getattr(record, name)
            if value is not None:
                (self._series.get(series) or self._of(series))(value)

    def _clear(self, name: str) -> None:
        self._families[name][0].clear()
        self._series = {series: put for series, put in self._series.items() if series[0] != name}

    def _say(self, name: str, *labels: str) -> None:
        """Make these labels the only ones of an info metric."""
        self._clear(name)
        self._put(name, 1, *labels)

    def _know(self, means: Mapping[str, float]) -> None:
        """Register gauges for the task's metrics that the table does not name."""
        for metric in means.keys() - self._known:
            self._known.add(metric)
            for where, what in _MEASURED.items():
                name = _name(where, metric)
                if name not in self._families:
                    self._add(gauge(name, f"The task's metric {metric} on {what}."))

    def _put_means(self, record: StepRecord | EvaluationRecord) -> None:
        for metric, mean in record.metrics.items():
            self._put(_name(record.where, metric), mean)

    def wanted(self, world_size: int) -> None:
        """Note that the process has started as one of `world_size` ranks."""
        self._put("world_size_wanted", world_size)

    def link(self, carried: Callable[[], Mapping[str, float]]) -> None:
        """Ask `carried` what the tunnel to other machines has counted, by metric, whenever Prometheus asks."""
        self._carried = carried

    def waiting(self, ranks: Iterable[int], first: bool = False) -> None:
        """Note that the rank is not in a group, because these ranks are missing.

        Before the `first` group forms, its process counts as ready: a cluster that replaces pods one by one goes on.
        """
        self._goodput.broke()
        missing = sorted(ranks)
        words = f"waiting for rank {', '.join(map(str, missing))}" if missing else "waiting for the group to form"
        self.unready = None if first else words
        self._put("ready", 0)
        self._put("world_size", 0)
        self._clear("waiting_for_rank")
        for rank in missing:
            self._put("waiting_for_rank", 1, str(rank))

    def formed(self, generation: int, world_size: int) -> None:
        """Note that the rank is in a group."""
        self._goodput.broke()
        self.unready = None
        self._clear("waiting_for_rank")
        self._put("generations")
        self._put("generation", generation)
        self._put("world_size", world_size)
        self._put("ready", 1)

    def started(self, info: RunInfo, job: Job, plan: Plan, done: int) -> None:
        """Note that training begins or goes on by a plan, with `done` steps completed."""
        epochs, steps = info.total_epochs or 1, info.total_steps or 1
        strategy = "explicit" if job.parallel.stages else job.parallel.strategy
        versions = info.versions["horizonml"], info.versions["torch"]
        self._say("run_info", job.name, job.model.name, job.data.name, strategy, *versions)
        held = [plan.stages[number] for number in plan.stages_of(info.rank)]
        self._say(
            "stage_info",
            ",".join(map(str, plan.stages_of(info.rank))),
            ",".join(str(stage.ranks.index(info.rank)) for stage in held),
            str(len(plan.stages)),
            ",".join(f"{stage.start}-{stage.stop - 1}" for stage in held),
            info.host,
        )
        for name in ("plan_step_seconds", "plan_memory_bytes", "slowdown_ratio"):
            self._clear(name)
        if info.forecast is not None:
            self._put("plan_step_seconds", info.forecast)
        if info.expected_memory is not None:
            self._put("plan_memory_bytes", info.expected_memory)
        self._put("steps_planned", steps)
        self._put("epochs_planned", epochs)
        self._put("epoch", 1 + done * epochs // steps if done < steps else epochs)
        self._newest = None
        self._put("step", done)
        self._put("last_step_timestamp_seconds", time.time())
        self._epoch_so_far = 0.0

    def step(self, record: StepRecord, step: StepResult) -> None:
        """Count a step in a few microseconds; what only the newest step decides is set when Prometheus asks."""
        self._know(record.metrics)
        if self._newest is None or self._newest.epoch != record.epoch:
            self._epoch_so_far = 0.0
        self._newest = record
        self._goodput.step(record.step, record.wall, self._clock())
        self._put("samples", step.entered)
        self._show(record, _EACH)
        if record.divergence is not None:
            local = record.local_steps is not None
            self._put("replica_divergence" if local else "gradient_divergence", record.divergence)
        for way, (sent, received) in step.traffic.items():
            if sent:
                self._put("sent_bytes", sent, way)
            if received:
                self._put("received_bytes", received, way)
        self._epoch_so_far += record.wall

    def collect(self) -> Iterator[Metric]:
        """Set the values of the newest step; the registry calls this first when Prometheus asks."""
        record = self._newest
        if record is not None:
            self._show(record, _NEWEST)
            self._put_means(record)
            self._put("bubble_ratio", record.wait / record.wall if record.wall else 0.0)
        self._collect_goodput(self._clock())
        self._collect_links()
        return iter(())

    def _collect_links(self) -> None:
        """Add what the tunnel has counted since the last time; it counts from 0 again when it is started anew."""
        carried = self._carried()
        for name, value in carried.items():
            before = self._carried_before.get(name, 0.0)
            self._put(name, value - before if value >= before else value)
        self._carried_before = {**self._carried_before, **carried}

    def _collect_goodput(self, now: float) -> None:
        """Bring the account of lost time up to now: an outage grows while Prometheus watches."""
        ratio = self._goodput.ratio(now)
        if ratio is not None:
            self._put("goodput_ratio", ratio)
        for cause, seconds in self._goodput.lost(now).items():
            self._put("lost_seconds", max(0.0, seconds - self._counted[cause]), cause)
            self._counted[cause] = max(seconds, self._counted[cause])

    def evaluation(self, record: EvaluationRecord) -> None:
        """Note the results of an evaluation."""
        self._goodput.got_on(self._clock())
        self._know(record.metrics)
        self._show(record, _OF_EVALUATION)
        self._put_means(record)
        if not record.within_epoch:
            self._put("epoch_duration_seconds", self._epoch_so_far)

    def checkpoint(self, step: int, saved: bool, seconds: float) -> None:
        """Note that a checkpoint was saved, or that saving it failed."""
        if not saved:
            self._put("checkpoint_failures")
            return
        self._put("checkpoints")
        self._put("checkpoint_timestamp_seconds", time.time())
        self._put("checkpoint_step", step)
        self._put("checkpoint_duration_seconds", seconds)

    def checkpoint_skipped(self) -> None:
        """Note that a checkpoint was left out because one before was still being written."""
        self._put("checkpoints_skipped")

    def slowdown(self, factor: float) -> None:
        """Note how the rank's computing compares with its plan."""
        self._put("slowdown_ratio", factor)

    def replanned(self) -> None:
        """Note that training goes on by a better plan."""
        self._put("replans")

    def lost(self, lost_ranks: int, silent_seconds: float) -> None:
        """Note that the group is over, because it has lost so many ranks.

        They had been silent for `silent_seconds` when that became known here: 0 where connections were closed.
        """
        self._goodput.broke()
        self._put("peers_lost", lost_ranks)
        self._put("loss_notice_seconds", silent_seconds)

    def recovered(self, seconds: float, steps_repeated: int, source: StateSource) -> None:
        """Note that the first step after a loss has ended, `seconds` after the loss was known here.

        `steps_repeated` steps that were done before have to be done again.
        """
        self._put("recovery_seconds", seconds, source)
        self._put("steps_repeated", steps_repeated)

    def replica(self, age_steps: int | None, covered: bool = True) -> None:
        """Note how far the copy of this rank's state in another rank's memory is behind it, in steps.

        None says that there is no such copy. It need not be there if other members hold the same state; `covered` says
        whether they do, or are a second holder of every layer that has no replica. Call this only if the job asks that
        no rank be alone with its state: an alert fires where it is.
        """
        self._put("replicated", float(covered))
        self._clear("replica_age_steps")
        if age_steps is not None:
            self._put("replica_age_steps", age_steps)

    def completed(self) -> None:
        """Note that the job is trained to the end."""
        self._goodput.complete(self._clock())
        self.unready = None
        self._clear("waiting_for_rank")
        self._put("complete", 1)
        self._put("ready", 1)


def _name(where: str, metric: str) -> str:
    return f"{where}_{metric_key(metric)}" + ("_ratio" if metric in SHARES else "")
