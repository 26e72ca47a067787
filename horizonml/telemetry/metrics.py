"""Updates one rank's Prometheus metrics, which `table` declares.

It also reads the CPU, memory and network use of a process and its container when Prometheus asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from horizonml.engine.clock import KINDS, Step
from horizonml.machine.accelerator import computing
from horizonml.machine.host import cpu_seconds, rss_bytes
from horizonml.machine.resources import available_cores, memory_limit, memory_used, throttled_seconds
from horizonml.telemetry.record import SHARES, EvaluationRecord, RunInfo, Source, StepRecord, metric_key
from horizonml.telemetry.table import CAUSES, CONTAINER, DIRECTIONS, TABLE, Cause, Goodput, MetricSpec


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
_KINDS = {"gauge": Gauge, "counter": Counter, "histogram": Histogram}


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
        self._families: dict[str, MetricWrapperBase] = {}
        self.registry.register(self)
        for spec in TABLE:
            self._add(spec)
        self.registry.register(Container(self.rank, root))
        # What every step changes is looked up once.
        self._phases = [self._histogram("step_phase_seconds", kind) for kind in KINDS]
        self._load = self._counter("load_seconds")
        self._traffic = [(d, self._counter("sent_bytes", d), self._counter("received_bytes", d)) for d in DIRECTIONS]

    def _add(self, spec: MetricSpec) -> None:
        """Register a metric of the table."""
        options = {"buckets": spec.buckets} if spec.type == "histogram" else {}
        name = f"horizonml_{spec.name}" + ("_total" if spec.type == "counter" else "")
        family = _KINDS[spec.type](name, spec.meaning, ("rank", *spec.labels), registry=self.registry, **options)
        self._families[spec.name] = family
        if spec.from_zero:
            family.labels(self.rank)
        for value in spec.values or ():
            family.labels(self.rank, value)

    def _gauge(self, name: str, *labels: str) -> Gauge:
        gauge = self._families[name].labels(self.rank, *labels)
        assert isinstance(gauge, Gauge)
        return gauge

    def _counter(self, name: str, *labels: str) -> Counter:
        counter = self._families[name].labels(self.rank, *labels)
        assert isinstance(counter, Counter)
        return counter

    def _histogram(self, name: str, *labels: str) -> Histogram:
        histogram = self._families[name].labels(self.rank, *labels)
        assert isinstance(histogram, Histogram)
        return histogram

    def _put(self, name: str, value: float) -> None:
        """Set a gauge, which is hidden before its first value."""
        self._gauge(name).set(value)

    def _say(self, name: str, *labels: str) -> None:
        """Make these labels the only ones of an info metric."""
        self._families[name].clear()
        self._gauge(name, *labels).set(1)

    def _know(self, means: Mapping[str, float]) -> None:
        """Register gauges for the task's metrics that the table does not name."""
        for metric in means.keys() - self._known:
            self._known.add(metric)
            for where, what in _MEASURED.items():
                name = _name(where, metric)
                if name not in self._families:
                    self._add(MetricSpec("gauge", name, f"The task's metric {metric} on {what}."))

    def _put_means(self, where: str, means: Mapping[str, float]) -> None:
        for metric, mean in means.items():
            self._put(_name(where, metric), mean)

    def wanted(self, world_size: int) -> None:
        """Note that the process has started as one of `world_size` ranks."""
        self._put("world_size_wanted", world_size)

    def link(self, carried: Callable[[], Mapping[str, float]]) -> None:
        """Ask `carried` what the tunnel to other machines has counted, by metric, whenever Prometheus asks."""
        self._carried = carried

    def waiting(self, ranks: Iterable[int]) -> None:
        """Note that the rank is not in a group, because these ranks are missing."""
        self._goodput.broke()
        missing = sorted(ranks)
        self.unready = (
            f"waiting for rank {', '.join(map(str, missing))}" if missing else "waiting for the group to form"
        )
        self._put("ready", 0)
        self._put("world_size", 0)
        self._families["waiting_for_rank"].clear()
        for rank in missing:
            self._gauge("waiting_for_rank", str(rank)).set(1)

    def formed(self, generation: int, world_size: int) -> None:
        """Note that the rank is in a group."""
        self._goodput.broke()
        self.unready = None
        self._families["waiting_for_rank"].clear()
        self._counter("generations").inc()
        self._put("generation", generation)
        self._put("world_size", world_size)
        self._put("ready", 1)

    def started(self, info: RunInfo, epochs: int, steps: int, done: int) -> None:
        """Note that training begins or goes on, with `done` of `steps` steps completed."""
        job, plan = info.job, info.plan
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
        self._say(
            "plan_info",
            plan.schedule,
            str(plan.micro_batches),
            "|".join(",".join(map(str, stage.ranks)) for stage in plan.stages),
            ",".join(str(stage.start) for stage in plan.stages[1:]),
            ",".join(stage.send for stage in plan.stages[:-1]),
        )
        for name in ("plan_step_seconds", "plan_memory_bytes", "slowdown_ratio"):
            self._families[name].clear()
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

    def step(self, record: StepRecord, step: Step) -> None:
        """Count a step in a few microseconds; what only the newest step decides is set when Prometheus asks."""
        self._know(record.metrics)
        if self._newest is None or self._newest.epoch != record.epoch:
            self._epoch_so_far = 0.0
        self._newest = record
        self._goodput.step(record.step, record.wall, self._clock())
        self._counter("samples").inc(step.entered)
        self._counter("rank_samples").inc(record.samples)
        if record.joules is not None:
            self._counter("energy_joules").inc(record.joules)
        self._histogram("step_duration_seconds").observe(record.wall)
        self._load.inc(record.load)
        if record.skipped:
            self._counter("samples_skipped").inc(record.skipped)
        for phase, seconds in zip(self._phases, (record.compute, record.transfer, record.wait), strict=True):
            phase.observe(seconds)
        if record.divergence is not None:
            local = record.local_steps is not None
            self._put("replica_divergence" if local else "gradient_divergence", record.divergence)
        if record.local_steps is not None:
            self._counter("local_steps").inc(record.local_steps)
        for direction, sent, received in self._traffic:
            out, back = step.traffic[direction]
            if out:
                sent.inc(out)
            if back:
                received.inc(back)
        self._epoch_so_far += record.wall

    def collect(self) -> Iterator[Metric]:
        """Set the values of the newest step; the registry calls this first when Prometheus asks."""
        record = self._newest
        if record is not None:
            self._put("step", record.step)
            self._put("epoch", record.epoch)
            self._put("last_step_timestamp_seconds", record.time)
            self._put("training_loss", record.loss)
            self._put_means("training", record.metrics)
            self._put("learning_rate", record.lr)
            if record.gradient_norm is not None:
                self._put("gradient_norm", record.gradient_norm)
            self._put("bubble_ratio", record.wait / record.wall if record.wall else 0.0)
        self._collect_goodput(self._clock())
        self._collect_links()
        return iter(())

    def _collect_links(self) -> None:
        """Add what the tunnel has counted since the last time; it counts from 0 again when it is started anew."""
        carried = self._carried()
        for name, value in carried.items():
            before = self._carried_before.get(name, 0.0)
            self._counter(name).inc(value - before if value >= before else value)
        self._carried_before = {**self._carried_before, **carried}

    def _collect_goodput(self, now: float) -> None:
        """Bring the account of lost time up to now: an outage grows while Prometheus watches."""
        ratio = self._goodput.ratio(now)
        if ratio is not None:
            self._put("goodput_ratio", ratio)
        for cause, seconds in self._goodput.lost(now).items():
            self._counter("lost_seconds", cause).inc(max(0.0, seconds - self._counted[cause]))
            self._counted[cause] = max(seconds, self._counted[cause])

    def evaluation(self, record: EvaluationRecord) -> None:
        """Note the results of an evaluation."""
        self._goodput.got_on(self._clock())
        self._know(record.metrics)
        self._put("held_out_loss", record.loss)
        self._put_means("held_out", record.metrics)
        self._put("evaluation_duration_seconds", record.seconds)
        if not record.within_epoch:
            self._put("epoch_duration_seconds", self._epoch_so_far)

    def checkpoint(self, step: int, saved: bool, seconds: float) -> None:
        """Note that a checkpoint was saved, or that saving it failed."""
        if not saved:
            self._counter("checkpoint_failures").inc()
            return
        self._counter("checkpoints").inc()
        self._put("checkpoint_timestamp_seconds", time.time())
        self._put("checkpoint_step", step)
        self._put("checkpoint_duration_seconds", seconds)

    def checkpoint_skipped(self) -> None:
        """Note that a checkpoint was left out because one before was still being written."""
        self._counter("checkpoints_skipped").inc()

    def slowdown(self, factor: float) -> None:
        """Note how the rank's computing compares with its plan."""
        self._put("slowdown_ratio", factor)

    def replanned(self) -> None:
        """Note that training goes on by a better plan."""
        self._counter("replans").inc()

    def lost(self, lost_ranks: int, silent_seconds: float | None) -> None:
        """Note that the group is over, because it has lost so many ranks; none if it ends for another reason.

        They had been silent for `silent_seconds` when that was published to the group; None if nobody knows.
        """
        self._goodput.broke()
        self._counter("peers_lost").inc(lost_ranks)
        if silent_seconds is not None:
            self._histogram("loss_notice_seconds").observe(silent_seconds)

    def recovered(self, seconds: float, steps_repeated: int, source: Source) -> None:
        """Note that the first step after a loss has ended, `seconds` after the loss was known here.

        `steps_repeated` steps that were done before have to be done again.
        """
        self._histogram("recovery_seconds", source).observe(seconds)
        self._counter("steps_repeated").inc(steps_repeated)

    def replica(self, age_steps: int | None, covered: bool = True) -> None:
        """Note how far the copy of this rank's state in another rank's memory is behind it, in steps.

        None says that there is no such copy. It need not be there if other members hold the same state; `covered` says
        whether they do, or are a second holder of every layer that has no replica. Call this only if the job asks that
        no rank be alone with its state: an alert fires where it is.
        """
        self._put("replicated", float(covered))
        self._families["replica_age_steps"].clear()
        if age_steps is not None:
            self._put("replica_age_steps", age_steps)

    def completed(self) -> None:
        """Note that the job is trained to the end."""
        self._goodput.complete(self._clock())
        self.unready = None
        self._families["waiting_for_rank"].clear()
        self._put("complete", 1)
        self._put("ready", 1)


def _name(where: str, metric: str) -> str:
    """Return the name of the gauge of a task's metric."""
    return f"{where}_{metric_key(metric)}" + ("_ratio" if metric in SHARES else "")
