"""The dashboard of devices: processors, memory, network, energy and checkpoints."""

from __future__ import annotations

from dashboards.panel import BLUE, GREEN, ORANGE, RED, Panel
from dashboards.queries import JOB, WHO, share

LOAD = ((None, GREEN), (0.75, ORANGE), (0.9, RED))
PANELS = [
    Panel(
        "bargauge",
        "CPU utilization per rank",
        "How busy is each processor? CPU time used, relative to the cores that the device or container may use.",
        "percentunit",
        [
            (
                f"sort_desc(rate(horizonml_cpu_seconds_total{{{WHO}}}[$__rate_interval])"
                f" / horizonml_cpu_limit_cores{{{WHO}}})",
                "rank {{rank}}",
            )
        ],
        low=0,
        high=1,
        steps=((None, GREEN),),
    ),
    Panel(
        "bargauge",
        "Memory utilization per rank",
        "How full is each memory? Resident memory of the process, relative to the memory of the device or container.",
        "percentunit",
        [
            (
                f"sort_desc(horizonml_resident_memory_bytes{{{WHO}}} / horizonml_memory_limit_bytes{{{WHO}}})",
                "rank {{rank}}",
            )
        ],
        low=0,
        high=1,
        steps=LOAD,
    ),
    Panel(
        "bargauge",
        "Idle time per rank",
        "How idle is each rank? The share of its steps that a rank spends waiting for others.",
        "percentunit",
        [(f"sort_desc({share('wait')})", "rank {{rank}}")],
        low=0,
        high=1,
        steps=((None, BLUE),),
    ),
    Panel(
        "timeseries",
        "CPU usage",
        "How many cores does each rank use? CPU seconds per second of its process.",
        "none",
        [(f"rate(horizonml_cpu_seconds_total{{{WHO}}}[$__rate_interval])", "rank {{rank}}")],
        low=0,
    ),
    Panel(
        "timeseries",
        "CPU throttling",
        "Is a processor held back? The share of time for which the container's CPU quota stopped the process.",
        "percentunit",
        [(f"rate(horizonml_cpu_throttled_seconds_total{{{WHO}}}[$__rate_interval])", "rank {{rank}}")],
        low=0,
        soft=0.5,
    ),
    Panel(
        "timeseries",
        "CPU limit",
        "How many cores may each rank use? The container's CPU quota, or else the device's cores.",
        "none",
        [(f"horizonml_cpu_limit_cores{{{WHO}}}", "rank {{rank}}")],
        low=0,
    ),
    Panel(
        "timeseries",
        "Resident memory",
        "How much memory does each process hold? This is what counts when memory runs out.",
        "bytes",
        [(f"horizonml_resident_memory_bytes{{{WHO}}}", "rank {{rank}}")],
        low=0,
    ),
    Panel(
        "timeseries",
        "Container memory",
        "How much memory does each container use? The figure includes the page cache, which the kernel gives back "
        "when memory is needed.",
        "bytes",
        [(f"horizonml_memory_used_bytes{{{WHO}}}", "rank {{rank}}")],
        low=0,
    ),
    Panel(
        "timeseries",
        "Memory limit",
        "How much memory is there, and how much is planned for? The container's limit, or else the device's memory, "
        "beside what an automatic plan expects each rank to need.",
        "bytes",
        [
            (f"horizonml_memory_limit_bytes{{{WHO}}}", "limit of rank {{rank}}"),
            (f"horizonml_plan_memory_bytes{{{WHO}}}", "plan for rank {{rank}}"),
        ],
        low=0,
    ),
    Panel(
        "timeseries",
        "Network transmit",
        "How much does each device send? Bytes per second over all interfaces of the container or device.",
        "Bps",
        [(f"rate(horizonml_network_sent_bytes_total{{{WHO}}}[$__rate_interval])", "rank {{rank}}")],
        low=0,
    ),
    Panel(
        "timeseries",
        "Network receive",
        "How much does each device receive? Bytes per second over all interfaces of the container or device.",
        "Bps",
        [(f"rate(horizonml_network_received_bytes_total{{{WHO}}}[$__rate_interval])", "rank {{rank}}")],
        low=0,
    ),
    Panel(
        "timeseries",
        "Power",
        "How much power does training take? Measured during steps, on devices that report it; the panel is empty "
        "where none does.",
        "watt",
        [(f"rate(horizonml_energy_joules_total{{{WHO}}}[$__rate_interval])", "rank {{rank}}")],
        low=0,
        without="No device here reports its power",
    ),
    Panel(
        "timeseries",
        "Checkpoint duration",
        "How long does saving a checkpoint take? The time of the newest one; a slow disk shows here.",
        "s",
        [(f"horizonml_checkpoint_duration_seconds{{{WHO}}}", "rank {{rank}}")],
        low=0,
        width=12,
    ),
    Panel(
        "timeseries",
        "Newest checkpoint",
        "At which step was the newest checkpoint saved? Shown beside the current step.",
        "none",
        [
            (f"max(horizonml_checkpoint_step{{{JOB}}})", "checkpoint"),
            (f"max(horizonml_step{{{JOB}}})", "current step"),
        ],
        low=0,
        width=12,
    ),
]
