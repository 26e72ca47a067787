"""Reads what the ranks of a run recorded, and sums it up."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horizonml.engine.clock import KINDS
from horizonml.errors import HorizonError
from horizonml.telemetry.log import read_lines

_WARM_UP = 3  # the first steps pay for caches and connections


@dataclass
class RankRecords:
    """One rank's file, by kind of record; of several attempts at a run, `run` is the last."""

    run: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    timelines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def settled(self) -> list[dict[str, Any]]:
        """The steps without the first few, as far as there are more."""
        return self.steps[min(_WARM_UP, len(self.steps) // 2) :]


@dataclass
class Run:
    """All ranks of a run."""

    name: str
    ranks: list[RankRecords]

    @property
    def lead(self) -> RankRecords:
        """Rank 0."""
        return self.ranks[0]

    @property
    def stages(self) -> list[dict[str, Any]]:
        """The plan's stages."""
        stages: list[dict[str, Any]] = self.lead.run["plan"]["stages"]
        return stages


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
    train_accuracy: float  # mean over the last epoch's batches
    train_loss: float
    epoch_seconds: float  # median of the epochs' training steps
    samples_per_second: float
    compute: float  # of the ranks' time
    transfer: float
    wait: float
    idle_seconds: float  # per rank and epoch: waiting for other ranks
    cpu_cores: float  # used by all ranks together
    cpu_utilisation: float  # of the cores that the ranks may use
    rss_mean_bytes: float  # per rank, over steps
    rss_peak_bytes: int  # of the largest rank
    idle_rss_bytes: int  # of a process that has only imported torch
    divergence: float | None  # |g_i - g| / |g|, mean over members and measured steps; None if never measured
    bytes_per_step: float  # sent by all ranks together
    bytes_per_second: float
    joules_per_sample: float | None  # of all machines; None where they do not tell


@dataclass(frozen=True)
class Traffic:
    """What a rank sends to its neighbours in one direction."""

    rank: int
    to: str  # "previous stage", "next stage", "members"
    bytes_per_step: float
    bytes_per_second: float


def load_run(name: str, folder: Path) -> Run:
    """Read the records of a run. Raises HorizonError if there are none that can be used."""
    files = sorted(folder.glob("rank-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
    if not files:
        raise HorizonError(f"{folder} has no records of a run (rank-*.jsonl)")
    ranks = [_load_rank(path) for path in files]
    for path, rank in zip(files, ranks, strict=True):
        if not rank.run or not rank.steps:
            raise HorizonError(f"{path} has no steps: the run ended before its first one was through")
    world_size = ranks[0].run.get("world_size", len(ranks))
    return Run(name, ranks[:world_size])


def _load_rank(path: Path) -> RankRecords:
    records = RankRecords({})
    steps: dict[int, dict[str, Any]] = {}  # a step that was lost and done again counts once
    evaluations: dict[int, dict[str, Any]] = {}
    for line in read_lines(path):
        if line["kind"] == "run":
            records.run = line
        elif line["kind"] == "step":
            steps[line["step"]] = line
        elif line["kind"] == "evaluation":
            evaluations[line["step"]] = line
        elif line["kind"] == "timeline":
            records.timelines.append(line)
    records.steps = [steps[number] for number in sorted(steps)]
    records.evaluations = [evaluations[number] for number in sorted(evaluations)]
    return records


def summarise(run: Run) -> Summary:
    """The run's numbers: last evaluation, medians of time, sums over ranks."""
    lead, plan = run.lead, run.lead.run["plan"]
    epochs = _by_epoch(lead.steps)
    everyone = [step for rank in run.ranks for step in rank.settled]
    wall = sum(step["wall"] for step in everyone)
    share = {kind: sum(step[kind] for step in everyone) / wall for kind in KINDS}
    cpu = sum(sum(s["cpu_seconds"] for s in rank.settled) / sum(s["wall"] for s in rank.settled) for rank in run.ranks)
    cores = sum({rank.run.get("host", ""): float(rank.run["cores"]) for rank in run.ranks}.values())
    steps, seconds = len(lead.settled), sum(step["wall"] for step in lead.settled)
    sent = sum(step["bytes_sent"] for step in everyone)
    divergences = [step["divergence"] for step in everyone if step.get("divergence") is not None]
    joules = [step["joules"] for step in everyone if step.get("joules") is not None]
    samples = sum(step["batch"] for step in lead.settled)
    last = epochs[max(epochs)]
    waits = [sum(step["wait"] for step in part) for rank in run.ranks for part in _by_epoch(rank.steps).values()]
    evaluation = lead.evaluations[-1] if lead.evaluations else {"accuracy": None, "loss": None}
    return Summary(
        ranks=len(run.ranks),
        plan="+".join(str(len(stage["ranks"])) for stage in plan["stages"]),
        micro_batches=plan["micro_batches"],
        updates=len(lead.steps),
        epochs=len(epochs),
        samples=sum(step["batch"] for step in lead.steps),
        accuracy=evaluation["accuracy"],
        loss=evaluation["loss"],
        train_accuracy=_weighted(last, "accuracy"),
        train_loss=_weighted(last, "loss"),
        epoch_seconds=statistics.median(sum(step["wall"] for step in part) for part in epochs.values()),
        samples_per_second=samples / seconds,
        compute=share["compute"],
        transfer=share["transfer"],
        wait=share["wait"],
        idle_seconds=statistics.mean(waits),
        cpu_cores=cpu,
        cpu_utilisation=cpu / cores,
        rss_mean_bytes=statistics.mean(step["rss_bytes"] for step in everyone),
        rss_peak_bytes=max(step["rss_bytes"] for rank in run.ranks for step in rank.steps),
        idle_rss_bytes=max(rank.run.get("rss_idle_bytes", 0) for rank in run.ranks),
        divergence=statistics.mean(divergences) if divergences else None,
        bytes_per_step=sent / steps,
        bytes_per_second=sent / seconds,
        joules_per_sample=sum(joules) / samples if joules else None,
    )


def traffic(run: Run) -> Iterator[Traffic]:
    """What every rank sends, link by link."""
    for rank in run.ranks:
        seconds = sum(step["wall"] for step in rank.settled)
        for direction, words in (("previous", "previous stage"), ("next", "next stage"), ("members", "members")):
            sent = sum(step.get("links", {}).get(direction, (0, 0))[0] for step in rank.settled)
            if sent:
                yield Traffic(int(rank.run["rank"]), words, sent / len(rank.settled), sent / seconds)


def _by_epoch(steps: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    epochs: dict[int, list[dict[str, Any]]] = {}
    for step in steps:
        epochs.setdefault(step["epoch"], []).append(step)
    return epochs


def _weighted(steps: list[dict[str, Any]], key: str) -> float:
    return float(sum(step[key] * step["batch"] for step in steps) / sum(step["batch"] for step in steps))
