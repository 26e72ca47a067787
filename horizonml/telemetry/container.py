"""Reads the CPU, memory and network use of a process and its container when Prometheus asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from horizonml.machine.accelerator import computing
from horizonml.machine.resources import available_cores, memory_limit, memory_used, throttled_seconds
from horizonml.machine.usage import cpu_seconds, rss_bytes
from horizonml.telemetry.table import CONTAINER


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
