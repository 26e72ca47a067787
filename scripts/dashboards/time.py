"""Where does the time go, who is slow?"""

from __future__ import annotations

from dashboards.panel import BLUE, SAMPLES_PER_SECOND, YELLOW, Panel
from dashboards.queries import JOB, PHASES, WHO, per_step, quantile, share

PANELS = [
    Panel(
        "bargauge",
        "Who computes longest?",
        "Compute time per step: the slowest rank sets the pace.",
        "s",
        [(per_step("compute"), "rank {{rank}}")],
        low=0,
    ),
    Panel(
        "bargauge",
        "Who moves bytes longest?",
        "Time per step for which a rank is held up while bytes move.",
        "s",
        [(per_step("transfer"), "rank {{rank}}")],
        low=0,
        steps=((None, YELLOW),),
    ),
    Panel(
        "bargauge",
        "Who waits longest?",
        "Time per step for which a rank waits for another one.",
        "s",
        [(per_step("wait"), "rank {{rank}}")],
        low=0,
        steps=((None, BLUE),),
    ),
    *(
        Panel(
            "timeseries",
            f"How much of its time is each rank in {phase}?",
            f"Share of each rank's time in {phase}; compute, transfer and wait add up to the step.",
            "percentunit",
            [(share(phase), "rank {{rank}}")],
            low=0,
            high=1,
        )
        for phase in PHASES
    ),
    Panel(
        "timeseries",
        "When does who wait?",
        "How many ranks wait at a time, by rank: as high as the number of ranks would mean that nobody computes.",
        "suffix:ranks",
        [(share("wait"), "rank {{rank}}")],
        width=12,
        low=0,
        stacked=True,
    ),
    Panel(
        "timeseries",
        "How large are the bubbles?",
        "Share of the newest step in which a rank waited for others.",
        "percentunit",
        [(f"horizonml_bubble_ratio{{{WHO}}}", "rank {{rank}}")],
        width=12,
        low=0,
        high=1,
    ),
    Panel(
        "timeseries",
        "How long is a step?",
        "Median, 90th and 99th percentile over all ranks' steps.",
        "s",
        [
            (quantile(0.5), "median"),
            (quantile(0.9), "90%"),
            (quantile(0.99), "99%"),
            (f"max(horizonml_plan_step_seconds{{{JOB}}})", "as an automatic plan predicts"),
        ],
        low=0,
    ),
    Panel(
        "timeseries",
        "Is everyone as fast as planned?",
        "Computing over what an automatic plan expects, compared with the other ranks; 1 is as planned.",
        "none",
        [(f"horizonml_slowdown_ratio{{{WHO}}}", "rank {{rank}}")],
        low=0,
        without="Only an automatic plan expects anything",
    ),
    Panel(
        "timeseries",
        "How much goes to which neighbours?",
        "Bytes sent per second, to the stage before, the one after, and to members of the same stage.",
        "Bps",
        [(f"sum by (direction) (rate(horizonml_sent_bytes_total{{{WHO}}}[$__rate_interval]))", "to {{direction}}")],
        low=0,
    ),
    Panel(
        "timeseries",
        "Which rank receives how much?",
        "Bytes received per second by each rank from its peers.",
        "Bps",
        [(f"sum by (rank) (rate(horizonml_received_bytes_total{{{WHO}}}[$__rate_interval]))", "rank {{rank}}")],
        low=0,
        width=12,
    ),
    Panel(
        "timeseries",
        "How many samples does each rank work on?",
        "Samples per second through each rank's stage.",
        SAMPLES_PER_SECOND,
        [(f"rate(horizonml_rank_samples_total{{{WHO}}}[$__rate_interval])", "rank {{rank}}")],
        width=12,
        low=0,
    ),
    Panel(
        "table",
        "Who does what?",
        "Each rank's place in the plan.",
        "none",
        [(f"max by (rank, stage, member, layers, node) (horizonml_stage_info{{{WHO}}})", "")],
        width=24,
        height=7,
        columns={
            "rank": "rank",
            "stage": "stage",
            "member": "member",
            "layers": "layers",
            "node": "node",
        },
    ),
]
