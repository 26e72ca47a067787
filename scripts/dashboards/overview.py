"""The overview of a job: progress, accuracy, speed, lost ranks and checkpoints."""

from __future__ import annotations

from dashboards.panel import BLUE, GREEN, ORANGE, RED, SAMPLES_PER_SECOND, Panel, curves, number, per_rank
from dashboards.queries import AGE, BY, JOB, PHASE_SECONDS, PHASES, SAMPLES, each, least, most

WAITED_FOR = f"sum by ({BY}, peer) (horizonml_waiting_for_rank{{{JOB}}})"
PANELS = [
    number(
        "Status",
        "Is the job training? It trains while every rank is in a formed group; otherwise it waits, or it is complete.",
        "none",
        [
            (
                f"({most('horizonml_complete')} == 1) * 2 or "
                f"{least('horizonml_ready')} * ({most('horizonml_world_size')} > bool 0)",
                "",
            )
        ],
        width=4,
        words={0: ("Waiting", ORANGE), 1: ("Training", GREEN), 2: ("Complete", BLUE)},
    ),
    number(
        "Progress",
        "How far is the job? Steps done, relative to all planned steps.",
        "percentunit",
        [(f"{most('horizonml_step')} / {most('horizonml_steps_planned')}", "")],
        width=3,
        low=0,
        high=1,
    ),
    number(
        "Held-out accuracy",
        "How good is the model? Accuracy on held-out data after the newest epoch.",
        "percentunit",
        [(most("horizonml_held_out_accuracy_ratio"), "")],
        width=3,
        low=0,
        high=1,
        decimals=1,
    ),
    number(
        "Throughput",
        "How fast is training? Samples per second, over all ranks.",
        SAMPLES_PER_SECOND,
        [(SAMPLES, "samples/s")],
        width=4,
        decimals=0,
    ),
    number(
        "Ranks",
        "Are all ranks there? Ranks in the group, beside the number that the job was started with.",
        "none",
        [
            (most("horizonml_world_size"), "present"),
            (most("horizonml_world_size_wanted"), "expected"),
        ],
        width=6,
        steps=((None, BLUE),),
    ),
    number(
        "Checkpoint age",
        "How much work is not saved yet? The age of the newest checkpoint, which is lost if all ranks are."
        " The loss of one rank costs no step.",
        "s",
        [(AGE, "")],
        width=4,
        steps=((None, GREEN), (600, ORANGE), (1800, RED)),
        decimals=0,
    ),
    curves(
        "Accuracy",
        "Does the model learn? Accuracy on held-out data after each epoch, and on the newest training batch.",
        "percentunit",
        [
            (most("horizonml_held_out_accuracy_ratio"), "held out"),
            (most("horizonml_training_accuracy_ratio"), "training"),
        ],
        high=1,
    ),
    curves(
        "Loss",
        "Does the model learn? Loss on held-out data after each epoch, and on the newest training batch.",
        "none",
        [
            (most("horizonml_held_out_loss"), "held out"),
            (most("horizonml_training_loss"), "training"),
        ],
    ),
    curves(
        "Time split",
        "Where does the time go? The shares of all ranks' time in compute, transfer and wait.",
        "percentunit",
        [
            (
                f"sum by ({BY}, phase) (rate({PHASE_SECONDS}[$__rate_interval])) / ignoring(phase) group_left "
                f"sum by ({BY}) (rate({PHASE_SECONDS}[$__rate_interval]))",
                "{{phase}}",
            )
        ],
        high=1,
        colours=PHASES,
        stacked=True,
    ),
    curves(
        "Samples per second",
        "How does the speed of training change over time? Samples per second, over all ranks.",
        SAMPLES_PER_SECOND,
        [(SAMPLES, "samples/s")],
        width=6,
    ),
    curves(
        "Epoch duration",
        "How long does an epoch take? The training steps of the newest epoch, and its evaluation.",
        "s",
        [
            (most("horizonml_epoch_duration_seconds"), "training"),
            (most("horizonml_evaluation_duration_seconds"), "evaluation"),
        ],
        width=6,
    ),
    per_rank(
        "Gradient divergence per rank",
        "Do the ranks' gradients agree? The distance of each rank's gradient from the mean, relative to the mean, "
        "before they are summed. A rank that is alone in its stage has none.",
        "none",
        each("horizonml_gradient_divergence"),
        width=6,
        without="No stage has several members whose gradients could differ",
    ),
    curves(
        "Gradient norm",
        "How large is the gradient? The norm of the whole gradient before it is clipped to optimizer.clip_norm.",
        "none",
        [(most("horizonml_gradient_norm"), "gradient norm")],
        width=6,
        without="Gradients are not clipped: optimizer.clip_norm is not set",
    ),
    curves(
        "Learning rate",
        "What is the learning rate? That of the newest step.",
        "none",
        [(most("horizonml_learning_rate"), "learning rate")],
        width=6,
    ),
    curves(
        "Group membership",
        "Was a rank lost? Ranks in the group, beside the number expected; the generation counts how often the group "
        "has formed.",
        "none",
        [
            (most("horizonml_world_size"), "ranks present"),
            (most("horizonml_world_size_wanted"), "ranks expected"),
            (most("horizonml_generation"), "generation"),
            (most("horizonml_peers_lost_total"), "losses"),
        ],
        width=6,
    ),
    curves(
        "Missing ranks",
        "Which ranks are the others waiting for? The number of missing ranks, and how many wait for each of them.",
        "none",
        [
            (f"count by ({BY}) ({WAITED_FOR}) or 0 * {least('horizonml_ready')}", "missing ranks"),
            (WAITED_FOR, "waiting for rank {{peer}}"),
        ],
        soft=4,
        width=6,
    ),
    curves(
        "Checkpoints",
        "Are checkpoints saved? The number saved, and the number that failed.",
        "none",
        [
            (most("horizonml_checkpoints_total"), "saved"),
            (most("horizonml_checkpoint_failures_total"), "failed"),
        ],
        width=6,
        colours={"saved": GREEN, "failed": RED},
    ),
    Panel(
        "table",
        "Jobs",
        "What is being trained? Each job, as its ranks report it.",
        "none",
        [
            (
                f"max by ({BY}, name, model, data, strategy, version, torch) (horizonml_run_info{{{JOB}}})",
                "",
            )
        ],
        width=24,
        height=6,
        columns={
            "job": "job",
            "namespace": "namespace",
            "name": "name",
            "model": "model",
            "data": "data",
            "strategy": "strategy",
            "version": "HorizonML",
            "torch": "PyTorch",
        },
    ),
]
