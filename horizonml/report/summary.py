"""Sums up a run: its speed, its accuracy, and what it took."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from horizonml.engine.clock import KINDS
from horizonml.report.records import RecordedRun
from horizonml.telemetry.record import SHOWN, StepRecord

_PARTS = 5  # a run with fewer than three epochs is judged by as many parts of equal length
# Which fields of a step's record reports show as their median, and what they call it.
MEDIANS = {name: how.column for name, how in SHOWN[StepRecord].items() if how.column}
_DIRECTIONS = {"previous": "previous stage", "next": "next stage", "members": "members"}


@dataclass(frozen=True)
class Summary:
    """A run in a line of a table. Seconds, bytes, joules; shares and accuracies from 0 to 1."""

    ranks: int
    plan: str  # members of each stage
    micro_batches: int
    updates: int
    epochs: int
    samples: int  # trained on, over all epochs
    accuracy: float | None  # on held-out data, after the last epoch; None if there was no evaluation
    loss: float | None
    train_accuracy: float | None  # mean over the last epoch's batches
    train_loss: float
    epoch_seconds: float  # the samples of an epoch at the run's median speed
    samples_per_second: float  # the median over the parts of the run: its epochs, or fifths where it has few
    slowest_part: float  # samples per second
    fastest_part: float
    compute: float  # of the ranks' time
    transfer: float
    wait: float
    idle_seconds: float  # per rank and epoch: waiting for other ranks
    cpu_cores: float  # used by all ranks together
    cpu_utilisation: float  # of the cores that the ranks may use
    rss_mean_bytes: float  # per rank, over steps
    rss_peak_bytes: int  # of the largest rank
    idle_rss_bytes: int  # of a process that has only imported torch
    best_step: int | None  # of the best checkpoint, if one was to be kept
    divergence: float | None  # |g_i - g| / |g|, mean over members and measured steps; None if never measured
    bytes_per_step: float  # sent by all ranks together
    bytes_per_second: float
    joules_per_sample: float | None  # of all machines; None where they do not measure it
    losses: int  # how many times a rank was lost
    joins: int  # how many times one joined while the others trained
    stopped_seconds: float  # without steps, because the group changed
    steps_repeated: int
    goodput: float | None  # the share of the wall time that changes of the group have not taken; None if unknown
    speed_up: float | None = None  # over the device that is fastest alone
    efficiency: float | None = None  # of what all devices do alone, added up
    perplexity: float | None = None  # of a language model, on held-out data
    unigram: float | None = None  # what frequencies alone would reach there
    medians: dict[str, float | None] = field(default_factory=dict)  # over steps, of the fields that `MEDIANS` names

    def to_json(self) -> dict[str, str | int | float | None]:
        """Return the numbers as a row of a table; the medians stand beside the others."""
        return {name: value for name, value in vars(self).items() if name != "medians"} | self.medians


@dataclass(frozen=True)
class Traffic:
    """What a rank sends to its neighbours in one direction."""

    rank: int
    to: str  # "previous stage", "next stage", "members"
    bytes_per_step: float
    bytes_per_second: float


def summarise(run: RecordedRun) -> Summary:
    """Return the run's numbers: its last evaluation, its median speed, and sums over its ranks."""
    lead, plan = run.lead, run.lead.run.plan
    epochs = _by_epoch(run.steps)
    speeds = _speeds(lead.settled)
    speed = statistics.median(speeds)
    everyone = [step for rank in run.ranks for step in rank.settled]
    wall = sum(step.wall for step in everyone)
    compute, transfer, wait = (sum(step.seconds(kind) for step in everyone) / wall for kind in KINDS)
    cpu = sum(sum(s.cpu_seconds for s in rank.settled) / sum(s.wall for s in rank.settled) for rank in run.ranks)
    # Two machines may have the same name; records from before there was a `node` have no better identity.
    hosts = {rank.run.node or rank.run.host: rank.run.cores for rank in run.ranks}
    sent = sum(step.bytes_sent for step in everyone)
    divergences = [step.divergence for step in everyone if step.divergence is not None]
    joules = [step.joules for step in everyone if step.joules is not None]
    metered = bool(joules) and not run.missing and all(rank.is_recorded for rank in run.ranks)
    last = epochs[max(epochs)]
    accuracies = [(step.accuracy, step.batch) for step in last if step.accuracy is not None]
    epoch_seconds = max(sum(step.batch for step in part) for part in epochs.values()) / speed
    evaluation = run.evaluations[-1] if run.evaluations else None
    return Summary(
        ranks=len(run.ranks) + len(run.missing),
        plan="+".join(str(len(stage.ranks)) for stage in plan.stages),
        micro_batches=plan.micro_batches,
        updates=len(run.steps),
        epochs=len(epochs),
        samples=sum(step.batch for step in run.steps),
        accuracy=evaluation.accuracy if evaluation else None,
        loss=evaluation.loss if evaluation else None,
        train_accuracy=_weighted(accuracies) if accuracies else None,
        train_loss=_weighted([(step.loss, step.batch) for step in last]),
        epoch_seconds=epoch_seconds,
        samples_per_second=speed,
        slowest_part=min(speeds),
        fastest_part=max(speeds),
        compute=compute,
        transfer=transfer,
        wait=wait,
        idle_seconds=wait * epoch_seconds,
        cpu_cores=cpu,
        cpu_utilisation=cpu / sum(hosts.values()),
        rss_mean_bytes=statistics.mean(step.rss_bytes for step in everyone),
        rss_peak_bytes=max(step.rss_bytes for rank in run.ranks for step in rank.steps),
        idle_rss_bytes=max(rank.run.rss_idle_bytes for rank in run.ranks),
        best_step=max((one.step for one in run.evaluations if one.best), default=None),
        divergence=statistics.mean(divergences) if divergences else None,
        bytes_per_step=sent / len(lead.settled),
        bytes_per_second=sent / sum(step.wall for step in lead.settled),
        joules_per_sample=sum(joules) / sum(step.batch for step in lead.settled) if metered else None,
        losses=run.history.lost,
        joins=run.history.joined,
        stopped_seconds=run.history.stopped,
        steps_repeated=run.history.steps_repeated,
        goodput=run.history.goodput,
        speed_up=run.worth.speed_up if run.worth is not None else None,
        efficiency=run.worth.efficiency if run.worth is not None else None,
        perplexity=evaluation.perplexity if evaluation else None,
        unigram=run.lead.run.unigram,
        medians={name: _median([getattr(step, name) for step in run.steps]) for name in MEDIANS},
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def traffic(run: RecordedRun) -> Iterator[Traffic]:
    """Yield what every rank sends, link by link."""
    for rank in run.ranks:
        seconds = sum(step.wall for step in rank.settled)
        for direction, words in _DIRECTIONS.items():
            sent = sum(step.links.get(direction, (0, 0))[0] for step in rank.settled)
            if sent:
                yield Traffic(rank.run.rank, words, sent / len(rank.settled), sent / seconds)


def _speeds(steps: Sequence[StepRecord]) -> list[float]:
    """Return the samples per second of each part of a run: of its epochs, or of fifths where it has fewer than three.

    The median of these is the run's speed, and the time of an epoch follows from it, so that the two always agree.
    """
    parts = list(_by_epoch(steps).values())
    if len(parts) < 3:
        count = min(_PARTS, len(steps))
        parts = [list(steps[len(steps) * n // count : len(steps) * (n + 1) // count]) for n in range(count)]
    return [sum(step.batch for step in part) / sum(step.wall for step in part) for part in parts]


def _by_epoch(steps: Sequence[StepRecord]) -> dict[int, list[StepRecord]]:
    epochs: dict[int, list[StepRecord]] = {}
    for step in steps:
        epochs.setdefault(step.epoch, []).append(step)
    return epochs


def _weighted(values: Sequence[tuple[float, int]]) -> float:
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
