"""Is my job healthy?"""

from __future__ import annotations

from dashboards.panel import BLUE, GREEN, ORANGE, RED, SAMPLES_PER_SECOND, Panel
from dashboards.queries import AGE, JOB, PHASE_SECONDS, PHASES, WHO

PANELS = [
    Panel(
        "stat",
        "Is it training?",
        "Whether every rank is in a formed group, or has completed the job.",
        "none",
        [
            (
                f"(max(horizonml_complete{{{JOB}}}) == 1) * 2 or "
                f"min(horizonml_ready{{{JOB}}}) * (max(horizonml_world_size{{{JOB}}}) > bool 0)",
                "",
            )
        ],
        width=4,
        height=4,
        words={0: ("Waiting", ORANGE), 1: ("Training", GREEN), 2: ("Complete", BLUE)},
    ),
    Panel(
        "stat",
        "How far is it?",
        "Steps done of all planned steps.",
        "percentunit",
        [(f"max(horizonml_step{{{JOB}}}) / max(horizonml_steps_planned{{{JOB}}})", "")],
        width=3,
        height=4,
        low=0,
        high=1,
    ),
    Panel(
        "stat",
        "How good is it?",
        "Accuracy on held-out data after the newest epoch.",
        "percentunit",
        [(f"max(horizonml_held_out_accuracy_ratio{{{JOB}}})", "")],
        width=3,
        height=4,
        low=0,
        high=1,
        decimals=1,
    ),
    Panel(
        "stat",
        "How fast is it?",
        "Samples trained on per second, over all ranks.",
        SAMPLES_PER_SECOND,
        [(f"sum(rate(horizonml_samples_total{{{JOB}}}[$__rate_interval]))", "samples/s")],
        width=6,
        height=4,
        decimals=0,
    ),
    Panel(
        "stat",
        "Are all ranks there?",
        "Ranks in the group, of those that the job was started with.",
        "none",
        [
            (f"max(horizonml_world_size{{{JOB}}})", "there"),
            (f"max(horizonml_world_size_wanted{{{JOB}}})", "wanted"),
        ],
        width=4,
        height=4,
        steps=((None, BLUE),),
    ),
    Panel(
        "stat",
        "What is not saved?",
        "Age of the newest checkpoint: what would be trained again.",
        "s",
        [(AGE, "")],
        width=4,
        height=4,
        steps=((None, GREEN), (600, ORANGE), (1800, RED)),
        decimals=0,
    ),
    Panel(
        "timeseries",
        "Does it learn? Accuracy",
        "On held-out data after each epoch, and on the newest training batch.",
        "percentunit",
        [
            (f"max(horizonml_held_out_accuracy_ratio{{{JOB}}})", "held out"),
            (f"max(horizonml_training_accuracy_ratio{{{JOB}}})", "training"),
        ],
        low=0,
        high=1,
    ),
    Panel(
        "timeseries",
        "Does it learn? Loss",
        "On held-out data after each epoch, and on the newest training batch.",
        "none",
        [
            (f"max(horizonml_held_out_loss{{{JOB}}})", "held out"),
            (f"max(horizonml_training_loss{{{JOB}}})", "training"),
        ],
        low=0,
    ),
    Panel(
        "timeseries",
        "Where does the time go?",
        "Share of all ranks' time in compute, transfer and wait.",
        "percentunit",
        [
            (
                f"sum by (phase) (rate({PHASE_SECONDS}[$__rate_interval])) / ignoring(phase) group_left "
                f"sum(rate({PHASE_SECONDS}[$__rate_interval]))",
                "{{phase}}",
            )
        ],
        low=0,
        high=1,
        colours=PHASES,
        stacked=True,
    ),
    Panel(
        "timeseries",
        "How fast is it over time?",
        "Samples trained on per second, over all ranks.",
        SAMPLES_PER_SECOND,
        [(f"sum(rate(horizonml_samples_total{{{JOB}}}[$__rate_interval]))", "samples/s")],
        low=0,
        width=6,
    ),
    Panel(
        "timeseries",
        "How long does an epoch take?",
        "Training steps of the newest epoch, and its evaluation.",
        "s",
        [
            (f"max(horizonml_epoch_duration_seconds{{{JOB}}})", "training"),
            (f"max(horizonml_evaluation_duration_seconds{{{JOB}}})", "evaluation"),
        ],
        low=0,
        width=6,
    ),
    Panel(
        "timeseries",
        "Do the ranks' gradients agree?",
        "Distance of each rank's gradient from the mean, relative to the mean, before they are summed (members of a "
        "stage only; a rank alone in its stage has none).",
        "none",
        [(f"horizonml_gradient_divergence{{{WHO}}}", "rank {{rank}}")],
        low=0,
        width=6,
        without="No stage has several members whose gradients could differ",
    ),
    Panel(
        "timeseries",
        "What is the learning rate?",
        "Of the newest step.",
        "none",
        [(f"max(horizonml_learning_rate{{{JOB}}})", "learning rate")],
        low=0,
        width=6,
    ),
    Panel(
        "timeseries",
        "Was a rank lost?",
        "Ranks in the group against those wanted; the generation counts formations.",
        "none",
        [
            (f"max(horizonml_world_size{{{JOB}}})", "ranks there"),
            (f"max(horizonml_world_size_wanted{{{JOB}}})", "ranks wanted"),
            (f"max(horizonml_generation{{{JOB}}})", "generation"),
            (f"max(horizonml_peers_lost_total{{{JOB}}})", "losses seen"),
        ],
        low=0,
        width=8,
    ),
    Panel(
        "timeseries",
        "Who is waited for?",
        "How many ranks wait for each one to join, and how many ranks are missing.",
        "none",
        [
            (f"count(sum by (peer) (horizonml_waiting_for_rank{{{JOB}}})) or vector(0)", "missing ranks"),
            (f"sum by (peer) (horizonml_waiting_for_rank{{{JOB}}})", "waiting for rank {{peer}}"),
        ],
        low=0,
        soft=4,
        width=8,
    ),
    Panel(
        "timeseries",
        "Are checkpoints saved?",
        "Checkpoints saved, and those that could not be.",
        "none",
        [
            (f"max(horizonml_checkpoints_total{{{JOB}}})", "saved"),
            (f"max(horizonml_checkpoint_failures_total{{{JOB}}})", "failed"),
        ],
        low=0,
        width=8,
        colours={"saved": GREEN, "failed": RED},
    ),
    Panel(
        "table",
        "What is trained?",
        "The job, as its ranks report it.",
        "none",
        [
            (
                f"max by (name, model, data, strategy, version, torch) (horizonml_run_info{{{JOB}}})",
                "",
            )
        ],
        width=24,
        height=4,
        columns={
            "name": "job",
            "model": "model",
            "data": "data",
            "strategy": "strategy",
            "version": "HorizonML",
            "torch": "PyTorch",
        },
    ),
]
