"""Lists every Prometheus metric with its name, type, meaning and labels.

Those that show a field of a record are declared with the field, in `record`; the others are declared here. Names
follow Prometheus' conventions (base units, `_total`, `_ratio`, `_info`). All metrics carry the label `rank` besides
the labels declared here. `docs/metrics.md` is made from this table.
"""

from __future__ import annotations

from collections.abc import Sequence

from horizonml.engine.clock import WAYS
from horizonml.telemetry.fields import MetricSpec, Record, counter, gauge
from horizonml.telemetry.goodput import CAUSES
from horizonml.telemetry.record import SHOWN, EvaluationRecord, StepRecord

# The bounds are the promises alone, because every bucket is a series that slow links carry with every scrape.
_NOTICED_SECONDS = (6.0,)  # of silence
_RECOVERED_SECONDS = (2.0, 4.0, 15.0)  # until all step again


def _recorded(kind: type[Record]) -> Sequence[MetricSpec]:
    """Return the metrics that show fields of a kind of record."""
    found = {how.metric.name: how.metric for how in SHOWN[kind].values() if how.metric is not None}
    return tuple(found.values())


TABLE: Sequence[MetricSpec] = (
    # The run and the group.
    gauge("run_info", "What is trained; always 1.", "name", "model", "data", "strategy", "version", "torch"),
    gauge("stage_info", "The rank's place in the plan; always 1.", "stage", "member", "stages", "layers", "node"),
    gauge("plan_step_seconds", "A step's time as the automatic plan predicts it."),
    gauge("slowdown_ratio", "The rank's computing over what was planned, compared with the others' (1: as planned)."),
    counter("replans", "New plans that were made because devices turned out slower or faster than planned."),
    gauge("ready", "1 while the rank is in a formed group, or has completed its job.", from_zero=True),
    gauge("complete", "1 when the job is trained to its end.", from_zero=True),
    gauge(
        "generation",
        "Generation of the group that this process is, or was last, a member of; a lower one than others' is stale.",
        from_zero=True,
    ),
    counter("generations", "Groups that this process has become a member of."),
    gauge("world_size", "Ranks in the formed group; 0 while there is none.", from_zero=True),
    gauge("world_size_wanted", "Ranks that the job was started with."),
    gauge("waiting_for_rank", "1 for each rank whose arrival this rank waits for.", "peer"),
    # Progress.
    gauge("steps_planned", "Steps of the whole run."),
    gauge("epochs_planned", "Epochs of the whole run."),
    counter(
        "samples",
        "Samples that entered the first stage at this rank; their sum over ranks is what was trained on.",
    ),
    gauge("training_accuracy_ratio", "Accuracy on the newest global batch."),
    gauge("held_out_accuracy_ratio", "Accuracy on held-out data in the newest evaluation."),
    gauge("epoch_duration_seconds", "Time of the newest epoch's training steps."),
    *_recorded(StepRecord),
    *_recorded(EvaluationRecord),
    # Where the time goes.
    gauge(
        "bubble_ratio",
        "Share of the newest step in which the rank waited for others (the pipeline's bubble) or for its data.",
    ),
    gauge(
        "replica_divergence",
        "Distance of this replica's outer gradient from the mean of all replicas at the last synchronisation, relative "
        "to the mean.",
    ),
    gauge(
        "gradient_divergence",
        "Distance of this rank's gradient before the reduction to the mean, relative to the mean.",
    ),
    MetricSpec(
        "counter",
        "sent_bytes",
        "Bytes sent to ranks of a neighbouring stage, or of this one.",
        ("direction",),
        WAYS,
    ),
    MetricSpec("counter", "received_bytes", "Bytes received, likewise.", ("direction",), WAYS),
    # Between machines; see docs/security.md.
    counter("link_sent_bytes", "Bytes that the rank's tunnel has sent to other machines.", from_zero=False),
    counter("link_received_bytes", "Bytes that the rank's tunnel has received from other machines.", from_zero=False),
    counter("link_cpu_seconds", "CPU time of the process that runs the rank's tunnel.", from_zero=False),
    counter("link_refused", "Connections without the token that the rank's tunnel has refused.", from_zero=False),
    # Faults and recovery.
    counter("peers_lost", "Other ranks that were lost from this rank's group."),
    MetricSpec(
        "histogram",
        "loss_notice_seconds",
        "How long lost ranks had been silent when their loss became known here: 0 where connections were closed.",
        buckets=_NOTICED_SECONDS,
    ),
    MetricSpec(
        "histogram",
        "recovery_seconds",
        "From the moment at which a loss was known here to the end of the first step after it.",
        ("source",),
        buckets=_RECOVERED_SECONDS,
    ),
    counter("steps_repeated", "Steps that were done before a loss, and had to be done again after it."),
    gauge("goodput_ratio", "Share of the wall time since this process's first step that faults have not taken."),
    MetricSpec(
        "counter",
        "lost_seconds",
        "Wall time that faults have taken since this process's first step.",
        ("cause",),
        CAUSES,
    ),
    gauge("replica_age_steps", "Steps by which the copy of this rank's state in another rank's memory is behind it."),
    gauge("replicated", "1 if every layer of this rank is in another rank's memory, too, or else 0."),
    gauge("plan_memory_bytes", "Memory that an automatic plan expects this process to need."),
    # Checkpoints.
    counter("checkpoints", "Checkpoints saved."),
    counter("checkpoint_failures", "Checkpoints that could not be saved."),
    counter("checkpoints_skipped", "Checkpoints that were left out because one before was still being written."),
    gauge("checkpoint_timestamp_seconds", "When the newest checkpoint was saved."),
    gauge("checkpoint_step", "Step of the newest checkpoint."),
    gauge("checkpoint_duration_seconds", "How long the newest checkpoint took."),
)

# These metrics are read when Prometheus asks; see `container`.
CONTAINER: Sequence[MetricSpec] = (
    gauge("resident_memory_bytes", "Resident memory of the process."),
    gauge("memory_used_bytes", "What counts against the container's memory limit."),
    gauge("memory_limit_bytes", "The container's memory limit, else the machine's memory."),
    gauge("cpu_limit_cores", "Cores that the process may use."),
    counter("cpu_seconds", "CPU time of the process, over all its threads."),
    counter("cpu_throttled_seconds", "Time for which the container's CPU quota held it up."),
    counter("network_sent_bytes", "Bytes sent by all interfaces of the container."),
    counter("network_received_bytes", "Bytes received by all interfaces of the container."),
    # Of ranks on an accelerator; see docs/speed.md.
    gauge("accelerator_memory_bytes", "Memory of the accelerator that the process uses."),
    gauge("accelerator_memory_limit_bytes", "Memory of the accelerator that the process may use."),
    gauge("accelerator_temperature_celsius", "Temperature of the accelerator, if it reports one."),
    gauge("accelerator_utilization_ratio", "Share of recent time in which the accelerator was busy."),
)

_HEAD = """\
# Metrics

What every rank shows at `/metrics`. Made from `horizonml/telemetry/record.py` and `horizonml/telemetry/table.py` by
`make generate`; change it there. All carry the label `rank`: the rank that the process was given at its start. A gauge
without a value yet (no epoch evaluated, no checkpoint saved) is not shown, and a histogram of losses not before the
first loss. Prometheus adds the labels `namespace`, `job`, `pod` and `node`: see [several
jobs](monitoring.md#several-jobs). To keep a scrape small on slow links, the page has the types of the metrics, but not
their meanings.

| metric | type | further labels | meaning |
|---|---|---|---|"""
_FOOT = """
A histogram `x` has the series `x_bucket` (label `le`), `x_sum` and `x_count`; a summary has the last two. `phase` is
`compute`, `transfer` or `wait`; `direction` is `previous` (the stage before), `next` (the stage after) or `members` (of
the same stage).

The histograms of losses have no series before the first loss, and `increase()` and `rate()` do not count what a series
begins with. To count the first loss, too, add series that are younger than the time in question:

```text
horizonml_recovery_seconds_count unless horizonml_recovery_seconds_count offset 10m
  or increase(horizonml_recovery_seconds_count[10m])
```

`source` is where the state that training went on with after a loss came from: `memory` (of the survivors), `replica`
(a lost rank's state, mirrored to another rank), `disk` (a checkpoint) or `start` (nothing was left: step 0). `cause` is
`outage` (from the last step before the group broke up, or was formed anew, to the beginning of the next one) or
`repeated` (steps that were done again). Goodput is 1 minus the share of both in the wall time since the first step of
the process; an undisturbed run has a goodput of 1, because its evaluations and checkpoints do not count as lost. A
process that replaces a lost one begins a new account; the survivors' accounts show what the loss has cost.

No metric but `horizonml_generation` carries the generation, which would start all series anew whenever the group is
formed. A stale process, whose group has gone on without it, is one with a lower generation than the others. Its series
have the label `instance` in common, which tells it from a process that has replaced it as the same rank:

```text
horizonml_step and on (namespace, job, instance)
  horizonml_generation < on (namespace, job) group_left max by (namespace, job) (horizonml_generation)
```

`horizonml_replica_age_steps` is shown only where the state has a replica: the members of a stage hold each other's
state. `horizonml_replicated` is shown only where the job asks that no rank be alone with its state.

The accuracy is that of image classification; the metrics of another task are called `horizonml_training_NAME` and
`horizonml_held_out_NAME` after their own names.
"""


def document() -> str:
    """Return the content of `docs/metrics.md`."""
    lines = [_HEAD]
    for spec in (*TABLE, *CONTAINER):
        name = spec.name + ("_total" if spec.type == "counter" else "")
        extra = ", ".join(f"`{label}`" for label in spec.labels)
        lines.append(f"| `horizonml_{name}` | {spec.type} | {extra} | {spec.meaning} |")
    return "\n".join([*lines, _FOOT])
