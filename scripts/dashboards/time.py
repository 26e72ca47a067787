"""The dashboard of step time: compute, transfer and wait of every rank, bubbles, and stragglers."""

from __future__ import annotations

from collections.abc import Iterator

from dashboards.panel import BLUE, SAMPLES_PER_SECOND, YELLOW, Panel, bars, curves, per_rank
from dashboards.queries import BY, PHASES, WHO, each, most, per_step, quantile, rate, share
from horizonml.telemetry.record import SHOWN, StepRecord


def recorded_panels() -> Iterator[Panel]:
    """The panels that are declared beside the number that they show, in horizonml/telemetry/record.py."""
    for how in SHOWN[StepRecord].values():
        if how.panel is not None and how.metric is not None:
            name = f"horizonml_{how.metric.name}"
            shown = rate(f"{name}_total") if how.metric.type == "counter" else each(name)
            yield per_rank(how.panel.title, how.panel.question, how.panel.unit, shown, without=how.panel.without)


PANELS = [
    bars(
        "Compute time per step",
        "Which rank computes longest? The slowest rank sets the pace.",
        "s",
        per_step("compute"),
    ),
    bars(
        "Transfer time per step",
        "Which rank is held up longest while bytes move?",
        "s",
        per_step("transfer"),
        steps=((None, YELLOW),),
    ),
    bars(
        "Wait time per step",
        "Which rank waits longest for another one?",
        "s",
        per_step("wait"),
        steps=((None, BLUE),),
    ),
    *(
        per_rank(
            f"{phase.capitalize()} share per rank",
            f"How much of its time does each rank spend in {phase}? Compute, transfer and wait add up to the step.",
            "percentunit",
            share(phase),
            high=1,
        )
        for phase in PHASES
    ),
    curves(
        "Waiting ranks",
        "How many ranks wait at a time? If as many waited as there are in the group, nobody would compute.",
        "suffix:ranks",
        [
            (f"sum by ({BY}) ({share('wait')})", "waiting"),
            (most("horizonml_world_size"), "in the group"),
        ],
        width=12,
    ),
    per_rank(
        "Pipeline bubble per rank",
        "How large are the bubbles? The share of the newest step in which a rank waited for others.",
        "percentunit",
        each("horizonml_bubble_ratio"),
        width=12,
        high=1,
    ),
    curves(
        "Step duration",
        "How long does a step take? The median, 90th and 99th percentile over all ranks' steps.",
        "s",
        [
            (quantile(0.5), "median"),
            (quantile(0.9), "90%"),
            (quantile(0.99), "99%"),
            (most("horizonml_plan_step_seconds"), "predicted by the plan"),
        ],
    ),
    per_rank(
        "Slowdown against the plan",
        "Is every rank as fast as planned? Compute time over what an automatic plan expects, relative to the other "
        "ranks; 1 means as planned.",
        "none",
        each("horizonml_slowdown_ratio"),
        without="Only automatic plans predict compute times",
    ),
    curves(
        "New plans",
        "How often did the ranks make a new plan, because a device turned out slower or faster than planned?",
        "none",
        [(most("horizonml_replans_total"), "since the process was started")],
        without="Only automatic plans are made anew",
    ),
    *recorded_panels(),
    per_rank(
        "Divergence of replicas",
        "How far apart are replicas that take local steps? The distance of each replica's outer gradient to the mean "
        "of all, relative to the mean, at the last synchronisation.",
        "none",
        each("horizonml_replica_divergence"),
        without="No rank here takes local steps (parallel.sync)",
    ),
    curves(
        "Bytes sent by direction",
        "How much is sent where? Bytes per second to the previous stage, to the next one, and to members of the same "
        "stage.",
        "Bps",
        [(f"sum by ({BY}, direction) ({rate('horizonml_sent_bytes_total')})", "to {{direction}}")],
    ),
    per_rank(
        "Bytes received per rank",
        "How much does each rank receive? Bytes per second from its peers.",
        "Bps",
        f"sum by ({BY}, node, rank) ({rate('horizonml_received_bytes_total')})",
        width=12,
    ),
    per_rank(
        "Samples per second and rank",
        "How many samples does each rank work on? Samples per second through its stage.",
        SAMPLES_PER_SECOND,
        rate("horizonml_rank_samples_total"),
        width=12,
    ),
    per_rank(
        "Time for data per rank",
        "Does loading keep up? The share of time in which a rank's steps could not go on without their samples.",
        "percentunit",
        rate("horizonml_load_seconds_total"),
        width=12,
        high=1,
    ),
    curves(
        "Skipped samples",
        "How many samples could not be read, and were replaced by others?",
        "none",
        [(most("horizonml_samples_skipped_total"), "since the process was started")],
        width=12,
    ),
    Panel(
        "table",
        "Plan",
        "Which rank does what? Each rank's place in the plan.",
        "none",
        [(f"max by ({BY}, rank, stage, member, layers, node) (horizonml_stage_info{{{WHO}}})", "")],
        width=24,
        height=7,
        columns={
            "rank": "rank",
            "stage": "stage",
            "member": "member",
            "layers": "layers",
            "node": "node",
            "job": "job",
        },
    ),
]
