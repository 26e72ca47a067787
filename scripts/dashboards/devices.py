"""The dashboard of devices: processors, memory, network, energy and checkpoints."""

from __future__ import annotations

from dashboards.panel import BLUE, GREEN, ORANGE, PER_RANK, RED, bars, curves, per_rank
from dashboards.queries import each, most, rate, share

LOAD = ((None, GREEN), (0.75, ORANGE), (0.9, RED))
PANELS = [
    bars(
        "CPU utilization per rank",
        "How busy is each processor? CPU time used, relative to the cores that the device or container may use.",
        "percentunit",
        f"{rate('horizonml_cpu_seconds_total')} / {each('horizonml_cpu_limit_cores')}",
        high=1,
        steps=((None, GREEN),),
    ),
    bars(
        "Memory utilization per rank",
        "How full is each memory? Resident memory of the process, relative to the memory of the device or container.",
        "percentunit",
        f"{each('horizonml_resident_memory_bytes')} / {each('horizonml_memory_limit_bytes')}",
        high=1,
        steps=LOAD,
    ),
    bars(
        "Idle time per rank",
        "How idle is each rank? The share of its steps that a rank spends waiting for others.",
        "percentunit",
        share("wait"),
        high=1,
        steps=((None, BLUE),),
    ),
    per_rank(
        "CPU usage",
        "How many cores does each rank use? CPU seconds per second of its process.",
        "none",
        rate("horizonml_cpu_seconds_total"),
    ),
    per_rank(
        "CPU throttling",
        "Is a processor held back? The share of time for which the container's CPU quota stopped the process.",
        "percentunit",
        rate("horizonml_cpu_throttled_seconds_total"),
        soft=0.5,
    ),
    per_rank(
        "CPU limit",
        "How many cores may each rank use? The container's CPU quota, or else the device's cores.",
        "none",
        each("horizonml_cpu_limit_cores"),
    ),
    per_rank(
        "Resident memory",
        "How much memory does each process hold? This is what counts when memory runs out.",
        "bytes",
        each("horizonml_resident_memory_bytes"),
    ),
    per_rank(
        "Container memory",
        "How much memory does each container use? The figure includes the page cache, which the kernel gives back "
        "when memory is needed.",
        "bytes",
        each("horizonml_memory_used_bytes"),
    ),
    curves(
        "Memory limit",
        "How much memory is there, and how much is planned for? The container's limit, or else the device's memory, "
        "beside what an automatic plan expects each rank to need.",
        "bytes",
        [
            (each("horizonml_memory_limit_bytes"), f"limit of {PER_RANK}"),
            (each("horizonml_plan_memory_bytes"), f"plan for {PER_RANK}"),
        ],
    ),
    per_rank(
        "Network transmit",
        "How much does each device send? Bytes per second over all interfaces of the container or device.",
        "Bps",
        rate("horizonml_network_sent_bytes_total"),
    ),
    per_rank(
        "Network receive",
        "How much does each device receive? Bytes per second over all interfaces of the container or device.",
        "Bps",
        rate("horizonml_network_received_bytes_total"),
    ),
    curves(
        "Protected links",
        "How much do ranks send to other machines through their tunnels, and what share of a core does that take? The "
        "panel is empty on one machine alone.",
        "Bps",
        [
            (rate("horizonml_link_sent_bytes_total"), f"sent by {PER_RANK}"),
            (rate("horizonml_link_received_bytes_total"), f"received by {PER_RANK}"),
        ],
        without="No rank here has a tunnel",
    ),
    per_rank(
        "Work of protected links",
        "What share of a core does each rank's tunnel take? A gigabyte takes a recent processor about 0.75 seconds.",
        "percentunit",
        rate("horizonml_link_cpu_seconds_total"),
        without="No rank here has a tunnel",
    ),
    per_rank(
        "Strangers",
        "How many connections without the token come to the port of each rank's tunnel?",
        "cps",
        rate("horizonml_link_refused_total"),
        without="No rank here has a tunnel",
    ),
    per_rank(
        "Power",
        "How much power does training take? Measured during steps, on devices that report it; the panel is empty "
        "where none does.",
        "watt",
        rate("horizonml_energy_joules_total"),
        without="No device here reports its power",
    ),
    per_rank(
        "Memory of accelerators",
        "How full is the memory of each accelerator? What the process has taken, relative to what it may use.",
        "percentunit",
        f"{each('horizonml_accelerator_memory_bytes')} / {each('horizonml_accelerator_memory_limit_bytes')}",
        high=1,
        without="No rank here computes on an accelerator",
    ),
    per_rank(
        "Utilization of accelerators",
        "For which part of the time does each accelerator compute?",
        "percentunit",
        each("horizonml_accelerator_utilization_ratio"),
        high=1,
        without="No accelerator here tells its utilization",
    ),
    per_rank(
        "Temperature of accelerators",
        "How hot is each accelerator? Most lower their clock above 80 to 90 degrees.",
        "celsius",
        each("horizonml_accelerator_temperature_celsius"),
        without="No accelerator here tells its temperature",
    ),
    per_rank(
        "Checkpoint duration",
        "How long does saving a checkpoint take? The time of the newest one; a slow disk shows here.",
        "s",
        each("horizonml_checkpoint_duration_seconds"),
        width=12,
    ),
    curves(
        "Newest checkpoint",
        "At which step was the newest checkpoint saved? Shown beside the current step.",
        "none",
        [
            (most("horizonml_checkpoint_step"), "checkpoint"),
            (most("horizonml_step"), "current step"),
        ],
        width=12,
    ),
]
