"""Reads what the ranks of a run recorded, and sums it up."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from horizonml.engine.clock import KINDS
from horizonml.errors import HorizonError
from horizonml.telemetry.log import read_lines

_WARM_UP = 3  # the first steps pay for caches and connections
_PARTS = 5  # a run with fewer than three epochs is judged by as many parts of equal length


@dataclass
class RankRecords:
    """One rank's file, by kind of record.

    `run` describes the newest attempt that trained: a rank that resumes a finished run, or is lost before its first
    step, writes a description that no steps follow, and that says nothing about the steps before it. `timed` are the
    steps that were made as `run` describes them: by the same rank, by the same plan, among as many others.
    """

    run: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    timed: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    timelines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def settled(self) -> list[dict[str, Any]]:
        """The timed steps without the first few, as far as there are more."""
        return self.timed[min(_WARM_UP, len(self.timed) // 2) :]


@dataclass
class Run:
    """The ranks of the newest group that trained, in the order of their ranks in that group."""

    name: str
    ranks: list[RankRecords]

    @property
    def lead(self) -> RankRecords:
        """Rank 0."""
        return self.ranks[0]

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """Every step of the run once, as its lowest rank recorded it: rank 0 may have joined later than others."""
        return _newest(step for rank in reversed(self.ranks) for step in rank.steps)

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """Every evaluation once, in the same way."""
        return _newest(one for rank in reversed(self.ranks) for one in rank.evaluations)

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
    accuracy: float | None  # on held-out data, after the last epoch; None without an evaluation, or for other tasks
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
    """Read the records of a run. Raises HorizonError if there are none that can be used.

    Files are named by the rank that a process started as. When ranks were lost, or a run was resumed with other ranks,
    only the files of the newest group count, ordered by the ranks that they had in it.
    """
    files = sorted(folder.glob("rank-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
    if not files:
        raise HorizonError(f"{folder} has no records of a run (rank-*.jsonl)")
    loaded = {path: _load_rank(path) for path in files}
    trained = [rank for rank, _ in loaded.values() if rank.steps]
    newest = max((rank.run for rank in trained), key=_age, default=None)
    members: dict[int, RankRecords] = {}
    for path, (rank, last) in loaded.items():
        if not rank.steps and (newest is None or _group(last) == _group(newest)):
            raise HorizonError(f"{path} has no steps: the run ended before its first one was through")
        if newest is not None and rank.steps and _group(rank.run) == _group(newest):
            number = int(rank.run["rank"])
            members[number] = max(members.get(number, rank), rank, key=lambda one: _age(one.run))
    return Run(name, [members[number] for number in sorted(members)])


def _age(run: dict[str, Any]) -> float:
    return float(run.get("time", 0.0))


def _group(run: dict[str, Any]) -> tuple[Any, Any]:
    """What the descriptions of one group's ranks have in common."""
    return run.get("generation"), run.get("world_size")


def _load_rank(path: Path) -> tuple[RankRecords, dict[str, Any]]:
    """Return a rank's records, and the newest description of it, whether steps follow it or not."""
    last: dict[str, Any] = {}
    run: dict[str, Any] = {}
    steps: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # a step that was lost and done again counts once
    evaluations, timelines = [], []
    for line in read_lines(path):
        if line["kind"] == "run":
            last = line
        elif line["kind"] == "step":
            run = last
            steps[line["step"]] = line, last
        elif line["kind"] == "evaluation":
            evaluations.append(line)
        elif line["kind"] == "timeline":
            timelines.append((line, last))
    ordered = [steps[number] for number in sorted(steps)]
    alike = [step for step, about in ordered if _setting(about) == _setting(run)]
    spans = [line for line, about in timelines if _setting(about) == _setting(run)]
    return RankRecords(run, [step for step, _ in ordered], alike, _newest(evaluations), spans), last


def _setting(run: dict[str, Any]) -> tuple[Any, ...]:
    """What steps must share to be timed together."""
    return run.get("rank"), run.get("world_size"), run.get("plan")


def _newest(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last record of each step, in the order of the steps."""
    found = {line["step"]: line for line in lines}
    return [found[number] for number in sorted(found)]


def summarise(run: Run) -> Summary:
    """The run's numbers: last evaluation, median speed, sums over ranks."""
    lead, plan = run.lead, run.lead.run["plan"]
    epochs = _by_epoch(run.steps)
    speeds = _speeds(lead.settled)
    speed = statistics.median(speeds)
    everyone = [step for rank in run.ranks for step in rank.settled]
    wall = sum(step["wall"] for step in everyone)
    share = {kind: sum(step[kind] for step in everyone) / wall for kind in KINDS}
    cpu = sum(sum(s["cpu_seconds"] for s in rank.settled) / sum(s["wall"] for s in rank.settled) for rank in run.ranks)
    # Two machines may have the same name; records from before there was a `node` have no better one.
    nodes = {rank.run.get("node") or rank.run.get("host", ""): float(rank.run["cores"]) for rank in run.ranks}
    cores = sum(nodes.values())
    steps, seconds = len(lead.settled), sum(step["wall"] for step in lead.settled)
    sent = sum(step["bytes_sent"] for step in everyone)
    divergences = [step["divergence"] for step in everyone if step.get("divergence") is not None]
    joules = [step["joules"] for step in everyone if step.get("joules") is not None]
    samples = sum(step["batch"] for step in lead.settled)
    last = epochs[max(epochs)]
    epoch_seconds = max(sum(step["batch"] for step in part) for part in epochs.values()) / speed
    evaluation = run.evaluations[-1] if run.evaluations else {}
    return Summary(
        ranks=len(run.ranks),
        plan="+".join(str(len(stage["ranks"])) for stage in plan["stages"]),
        micro_batches=plan["micro_batches"],
        updates=len(run.steps),
        epochs=len(epochs),
        samples=sum(step["batch"] for step in run.steps),
        accuracy=evaluation.get("accuracy"),
        loss=evaluation.get("loss"),
        train_accuracy=_weighted(last, "accuracy") if all("accuracy" in step for step in last) else None,
        train_loss=_weighted(last, "loss"),
        epoch_seconds=epoch_seconds,
        samples_per_second=speed,
        slowest_part=min(speeds),
        fastest_part=max(speeds),
        compute=share["compute"],
        transfer=share["transfer"],
        wait=share["wait"],
        idle_seconds=share["wait"] * epoch_seconds,
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


def _speeds(steps: list[dict[str, Any]]) -> list[float]:
    """Return the samples per second of each part of a run: of its epochs, or of fifths where it has fewer than three.

    The median of these is the run's speed, and the time of an epoch follows from it, so that one cannot say something
    else than the other.
    """
    parts = list(_by_epoch(steps).values())
    if len(parts) < 3:
        count = min(_PARTS, len(steps))
        parts = [steps[len(steps) * n // count : len(steps) * (n + 1) // count] for n in range(count)]
    return [sum(step["batch"] for step in part) / sum(step["wall"] for step in part) for part in parts]


def _by_epoch(steps: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    epochs: dict[int, list[dict[str, Any]]] = {}
    for step in steps:
        epochs.setdefault(step["epoch"], []).append(step)
    return epochs


def _weighted(steps: list[dict[str, Any]], key: str) -> float:
    return float(sum(step[key] * step["batch"] for step in steps) / sum(step["batch"] for step in steps))
