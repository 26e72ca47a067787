"""Are the devices all right?"""

from __future__ import annotations

from dashboards.panel import BLUE, GREEN, ORANGE, RED, Panel
from dashboards.queries import JOB, WHO, share

LOAD = ((None, GREEN), (0.75, ORANGE), (0.9, RED))
PANELS = [
    Panel(
        "bargauge",
        "How busy is each processor?",
        "Processor time used, of what the device or container may use.",
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
        "How full is each memory?",
        "Resident memory of the process, of what the device or container has.",
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
        "How idle is each rank?",
        "Share of its steps in which a rank waits for others.",
        "percentunit",
        [(f"sort_desc({share('wait')})", "rank {{rank}}")],
        low=0,
        high=1,
        steps=((None, BLUE),),
    ),
    Panel(
        "timeseries",
        "How many cores does each rank use?",
        "Processor seconds per second of the process.",
        "none",
        [(f"rate(horizonml_cpu_seconds_total{{{WHO}}}[$__rate_interval])", "rank {{rank}}")],
        low=0,
    ),
    Panel(
        "timeseries",
        "Is a processor held back?",
        "Time per second for which the container's quota stopped it.",
        "percentunit",
        [(f"rate(horizonml_cpu_throttled_seconds_total{{{WHO}}}[$__rate_interval])", "rank {{rank}}")],
        low=0,
        soft=0.5,
    ),
    Panel(
        "timeseries",
        "How many cores may each rank use?",
        "The container's quota, or the device's cores.",
        "none",
        [(f"horizonml_cpu_limit_cores{{{WHO}}}", "rank {{rank}}")],
        low=0,
    ),
    Panel(
        "timeseries",
        "How much memory does each process hold?",
        "Resident memory; what counts when memory runs out.",
        "bytes",
        [(f"horizonml_resident_memory_bytes{{{WHO}}}", "rank {{rank}}")],
        low=0,
    ),
    Panel(
        "timeseries",
        "How much memory does the container use?",
        "With the cache of files, which is given back when needed.",
        "bytes",
        [(f"horizonml_memory_used_bytes{{{WHO}}}", "rank {{rank}}")],
        low=0,
    ),
    Panel(
        "timeseries",
        "How much memory is there?",
        "The container's limit, else the device's memory.",
        "bytes",
        [(f"horizonml_memory_limit_bytes{{{WHO}}}", "rank {{rank}}")],
        low=0,
    ),
    Panel(
        "timeseries",
        "How much is sent over the network?",
        "All interfaces of the container or device.",
        "Bps",
        [(f"rate(horizonml_network_sent_bytes_total{{{WHO}}}[$__rate_interval])", "rank {{rank}}")],
        low=0,
    ),
    Panel(
        "timeseries",
        "How much is received?",
        "All interfaces of the container or device.",
        "Bps",
        [(f"rate(horizonml_network_received_bytes_total{{{WHO}}}[$__rate_interval])", "rank {{rank}}")],
        low=0,
    ),
    Panel(
        "timeseries",
        "How much power does training take?",
        "Of each device that tells it, during its steps; empty where none does.",
        "watt",
        [(f"rate(horizonml_energy_joules_total{{{WHO}}}[$__rate_interval])", "rank {{rank}}")],
        low=0,
        without="No device here tells its power",
    ),
    Panel(
        "timeseries",
        "How long does saving a checkpoint take?",
        "Time of the newest one; slow disks show here.",
        "s",
        [(f"horizonml_checkpoint_duration_seconds{{{WHO}}}", "rank {{rank}}")],
        low=0,
        width=12,
    ),
    Panel(
        "timeseries",
        "At which step was the newest checkpoint?",
        "Beside the step that each rank is at.",
        "none",
        [
            (f"max(horizonml_checkpoint_step{{{JOB}}})", "checkpoint"),
            (f"max(horizonml_step{{{JOB}}})", "now"),
        ],
        low=0,
        width=12,
    ),
]
