"""What faults cost: losses, the time until they are noticed and got over, repeated steps, replicas and lost time."""

from __future__ import annotations

from dashboards.panel import BLUE, GREEN, ORANGE, RED, Panel, curves, number, per_rank
from dashboards.queries import AGE, BY, JOB, each, grown, least, most, rate

SOURCES = {"memory": GREEN, "replica": BLUE, "disk": ORANGE, "start": RED}
CAUSES = {"outage": ORANGE, "repeated": RED}


def seen(series: str, window: str, by: str = BY, labels: str = JOB) -> str:
    """What a series of a histogram has counted in a time, over all ranks of each job."""
    return f"sum by ({by}) {grown(f'horizonml_{series}', window, labels)}"


def mean(histogram: str, window: str, by: str = BY) -> str:
    """The mean of what a histogram saw in a time, over all ranks of each job."""
    return f"{seen(f'{histogram}_sum', window, by)} / ({seen(f'{histogram}_count', window, by)} > 0)"


def within(histogram: str, bound: str) -> str:
    """The share of what a histogram saw, in the time that the dashboard shows, that took at most `bound` seconds."""
    bucket = seen(f"{histogram}_bucket", "$__range", labels=f'{JOB},le="{bound}"')
    return f"{bucket} / ({seen(f'{histogram}_count', '$__range')} > 0)"


PANELS = [
    number(
        "Goodput",
        "How much of the time goes into training? The share of the wall time that faults have not taken, as the rank "
        "sees it that has lost most.",
        "percentunit",
        [(least("horizonml_goodput_ratio"), "")],
        width=4,
        low=0,
        high=1,
        steps=((None, RED), (0.9, ORANGE), (0.97, GREEN)),
        decimals=1,
    ),
    number(
        "Losses",
        "How many ranks were lost? As the rank counts them that has seen most, since its process was started.",
        "none",
        [(most("horizonml_peers_lost_total"), "")],
        width=4,
        steps=((None, GREEN), (1, ORANGE)),
    ),
    number(
        "Time to notice",
        "How long is a lost rank silent before it is noticed? The mean over the time shown; at most 6 s are promised, "
        "and a process that is killed is noticed at once.",
        "s",
        [(mean("loss_notice_seconds", "$__range"), "")],
        width=4,
        steps=((None, GREEN), (6, ORANGE), (10, RED)),
        decimals=1,
        without="No loss",
    ),
    number(
        "Time to recover",
        "How long does it take to train again after a loss? From the moment at which it was known to the end of the "
        "next step, as a mean over the time shown.",
        "s",
        [(mean("recovery_seconds", "$__range"), "")],
        width=4,
        steps=((None, GREEN), (4, ORANGE), (15, RED)),
        decimals=1,
        without="No loss",
    ),
    number(
        "Steps repeated",
        "How many steps had to be done again? As the rank counts them that has repeated most, since its process was "
        "started.",
        "none",
        [(most("horizonml_steps_repeated_total"), "")],
        width=4,
        steps=((None, GREEN), (1, ORANGE)),
    ),
    number(
        "Second holders",
        "Can every rank be lost without its state? The share of ranks whose layers are all in another rank's memory.",
        "percentunit",
        [(f"avg by ({BY}) (horizonml_replicated{{{JOB}}})", "")],
        width=4,
        low=0,
        high=1,
        steps=((None, RED), (1, GREEN)),
        decimals=0,
        without="Not asked for",
    ),
    per_rank(
        "Goodput per rank",
        "When did faults cost time? The share of each rank's wall time, since its first step, that faults have not "
        "taken. A rank that was started anew begins a new account.",
        "percentunit",
        each("horizonml_goodput_ratio"),
        high=1,
        low=None,
    ),
    curves(
        "Lost time",
        "What do faults take time for? The share of the time that outages and repeated steps take, for the rank that "
        "loses most.",
        "percentunit",
        [
            (
                f"clamp_max(max by ({BY}, cause) ({rate('horizonml_lost_seconds_total')}), 1)",
                "{{cause}}",
            )
        ],
        soft=0.1,
        colours=CAUSES,
    ),
    curves(
        "Losses and formations",
        "How often is the group formed anew? The groups that each rank's process has been a member of, and the ranks "
        "that were lost from them.",
        "none",
        [
            (most("horizonml_generations_total"), "groups formed"),
            (most("horizonml_peers_lost_total"), "ranks lost"),
            (f"{most('horizonml_generation')} - {least('horizonml_generation')}", "generations between ranks"),
        ],
        soft=4,
        colours={"groups formed": BLUE, "ranks lost": RED, "generations between ranks": ORANGE},
    ),
    curves(
        "Recovery",
        "How long did each recovery take, and where did the state come from? The mean over the ranks, from the moment "
        "at which the loss was known to the end of the next step.",
        "s",
        [(mean("recovery_seconds", "$__rate_interval", f"{BY}, source"), "from {{source}}")],
        colours={f"from {source}": colour for source, colour in SOURCES.items()},
        points=True,
        without="No rank was lost",
    ),
    Panel(
        "stat",
        "Promises kept",
        "Are losses noticed and got over in time? The share of losses that were noticed within 6 s of silence, and of "
        "those after which a rank trained again within 4 s and within 15 s, over the time shown.",
        "percentunit",
        [
            (within("loss_notice_seconds", "6.0"), "noticed in 6 s"),
            (within("recovery_seconds", "4.0"), "over in 4 s"),
            (within("recovery_seconds", "15.0"), "over in 15 s"),
        ],
        low=0,
        high=1,
        steps=((None, RED), (0.9, ORANGE), (0.99, GREEN)),
        decimals=0,
        without="No rank was lost",
    ),
    per_rank(
        "Repeated steps per rank",
        "Which steps were done in vain? The steps that each rank has had to do again, since its process was started.",
        "none",
        each("horizonml_steps_repeated_total"),
        soft=4,
    ),
    per_rank(
        "Replica age",
        "How much would the loss of a rank cost? The steps by which the copy of its state in another rank's memory is "
        "behind it. Members of one stage hold each other's state and need no copy.",
        "suffix:steps",
        each("horizonml_replica_age_steps"),
        soft=2,
        without="No rank is alone in its stage, or no copies are asked for",
    ),
    curves(
        "Checkpoint results",
        "Is the disk up to it? Checkpoints that could not be saved, or were skipped because one before was still being "
        "written.",
        "none",
        [
            (most("horizonml_checkpoint_failures_total"), "failed"),
            (most("horizonml_checkpoints_skipped_total"), "skipped"),
        ],
        soft=4,
        colours={"failed": RED, "skipped": ORANGE},
    ),
    curves(
        "Age of checkpoint",
        "What would be lost with all ranks at once? The age of the newest checkpoint.",
        "s",
        [(AGE, "newest checkpoint")],
    ),
]
