"""The overview of a job: progress, accuracy, speed, lost ranks and checkpoints."""

from __future__ import annotations

from dashboards.panel import BLUE, GREEN, ORANGE, RED, SAMPLES_PER_SECOND, Panel
from dashboards.queries import AGE, JOB, PHASE_SECONDS, PHASES, WHO

PANELS = [
    Panel(
        "stat",
        "Status",
        "Is the job training? It trains while every rank is in a formed group; otherwise it waits, or it is complete.",
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
        "Progress",
        "How far is the job? Steps done, relative to all planned steps.",
        "percentunit",
        [(f"max(horizonml_step{{{JOB}}}) / max(horizonml_steps_planned{{{JOB}}})", "")],
        width=3,
        height=4,
        low=0,
        high=1,
    ),
    Panel(
        "stat",
        "Held-out accuracy",
        "How good is the model? Accuracy on held-out data after the newest epoch.",
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
        "Throughput",
        "How fast is training? Samples per second, over all ranks.",
        SAMPLES_PER_SECOND,
        [(f"sum(rate(horizonml_samples_total{{{JOB}}}[$__rate_interval]))", "samples/s")],
        width=6,
        height=4,
        decimals=0,
    ),
    Panel(
        "stat",
        "Ranks",
        "Are all ranks there? Ranks in the group, beside the number that the job was started with.",
        "none",
        [
            (f"max(horizonml_world_size{{{JOB}}})", "present"),
            (f"max(horizonml_world_size_wanted{{{JOB}}})", "expected"),
        ],
        width=4,
        height=4,
        steps=((None, BLUE),),
    ),
    Panel(
        "stat",
        "Checkpoint age",
        "How much work is not saved yet? The age of the newest checkpoint, which is lost if all ranks are."
        " The loss of one rank costs no step.",
        "s",
        [(AGE, "")],
        width=4,
        height=4,
        steps=((None, GREEN), (600, ORANGE), (1800, RED)),
        decimals=0,
    ),
    Panel(
        "timeseries",
        "Accuracy",
        "Does the model learn? Accuracy on held-out data after each epoch, and on the newest training batch.",
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
        "Loss",
        "Does the model learn? Loss on held-out data after each epoch, and on the newest training batch.",
        "none",
        [
            (f"max(horizonml_held_out_loss{{{JOB}}})", "held out"),
            (f"max(horizonml_training_loss{{{JOB}}})", "training"),
        ],
        low=0,
    ),
    Panel(
        "timeseries",
        "Time split",
        "Where does the time go? The shares of all ranks' time in compute, transfer and wait.",
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
        "Samples per second",
        "How does the speed of training change over time? Samples per second, over all ranks.",
        SAMPLES_PER_SECOND,
        [(f"sum(rate(horizonml_samples_total{{{JOB}}}[$__rate_interval]))", "samples/s")],
        low=0,
        width=6,
    ),
    Panel(
        "timeseries",
        "Epoch duration",
        "How long does an epoch take? The training steps of the newest epoch, and its evaluation.",
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
        "Gradient divergence per rank",
        "Do the ranks' gradients agree? The distance of each rank's gradient from the mean, relative to the mean, "
        "before they are summed. A rank that is alone in its stage has none.",
        "none",
        [(f"horizonml_gradient_divergence{{{WHO}}}", "rank {{rank}}")],
        low=0,
        width=6,
        without="No stage has several members whose gradients could differ",
    ),
    Panel(
        "timeseries",
        "Gradient norm",
        "How large is the gradient? The norm of the whole gradient before it is clipped to optimizer.clip_norm.",
        "none",
        [(f"max(horizonml_gradient_norm{{{JOB}}})", "gradient norm")],
        low=0,
        width=6,
        without="Gradients are not clipped: optimizer.clip_norm is not set",
    ),
    Panel(
        "timeseries",
        "Learning rate",
        "What is the learning rate? That of the newest step.",
        "none",
        [(f"max(horizonml_learning_rate{{{JOB}}})", "learning rate")],
        low=0,
        width=6,
    ),
    Panel(
        "timeseries",
        "Group membership",
        "Was a rank lost? Ranks in the group, beside the number expected; the generation counts how often the group "
        "has formed.",
        "none",
        [
            (f"max(horizonml_world_size{{{JOB}}})", "ranks present"),
            (f"max(horizonml_world_size_wanted{{{JOB}}})", "ranks expected"),
            (f"max(horizonml_generation{{{JOB}}})", "generation"),
            (f"max(horizonml_peers_lost_total{{{JOB}}})", "losses"),
        ],
        low=0,
        width=8,
    ),
    Panel(
        "timeseries",
        "Missing ranks",
        "Which ranks are the others waiting for? The number of missing ranks, and how many wait for each of them.",
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
        "Checkpoints",
        "Are checkpoints saved? The number saved, and the number that failed.",
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
        "Job",
        "What is being trained? The job, as its ranks report it.",
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
