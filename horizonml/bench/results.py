"""Reads what the ranks of a run recorded, and sums it up."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horizonml.engine.clock import KINDS
from horizonml.errors import HorizonError
from horizonml.telemetry.log import read_lines

_WARM_UP = 3  # the first steps pay for caches and connections


@dataclass
class RankRecords:
    """One rank's file, by kind of record."""

    run: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    timelines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def settled(self) -> list[dict[str, Any]]:
        """The steps without the first few."""
        return self.steps[_WARM_UP:] or self.steps


@dataclass
class Run:
    """All ranks of a run."""

    name: str
    ranks: list[RankRecords]

    @property
    def lead(self) -> RankRecords:
        """Rank 0."""
        return self.ranks[0]


@dataclass(frozen=True)
class Summary:
    """A run in a line of a table."""

    name: str
    ranks: int
    plan: str
    micro_batches: int
    updates: int
    samples: int
    accuracy: float  # on held-out data, after the last epoch
    loss: float
    epoch_seconds: float  # median
    samples_per_second: float
    compute: float  # shares of the ranks' time, 0 to 1
    transfer: float
    wait: float
    cpu_cores: float  # used by all ranks together
    rss_bytes: int  # of the largest rank
    idle_rss_bytes: int  # of a process that has only imported torch
    bytes_per_step: float  # sent by all ranks together


def load_run(name: str, folder: Path) -> Run:
    """Read the records of a run. Raises HorizonError if there are none."""
    files = sorted(folder.glob("rank-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
    if not files:
        raise HorizonError(f"{folder} has no records of a run (rank-*.jsonl)")
    return Run(name, [_load_rank(path) for path in files])


def _load_rank(path: Path) -> RankRecords:
    records = RankRecords({})
    places = {"step": records.steps, "evaluation": records.evaluations, "timeline": records.timelines}
    for line in read_lines(path):
        if line["kind"] == "run":
            records.run = line
        elif line["kind"] in places:
            places[line["kind"]].append(line)
    return records


def summarise(run: Run) -> Summary:
    """The run's numbers: last evaluation, medians of time, sums over ranks."""
    lead, plan = run.lead, run.lead.run["plan"]
    walls = dict.fromkeys(range(1, lead.steps[-1]["epoch"] + 1), 0.0)
    for step in lead.steps:
        walls[step["epoch"]] += step["wall"]
    everyone = [step for rank in run.ranks for step in rank.settled]
    wall = sum(step["wall"] for step in everyone)
    share = {kind: sum(step[kind] for step in everyone) / wall for kind in KINDS}
    cpu = sum(sum(s["cpu_seconds"] for s in rank.settled) / sum(s["wall"] for s in rank.settled) for rank in run.ranks)
    steps = len(lead.settled)
    return Summary(
        name=run.name,
        ranks=len(run.ranks),
        plan="+".join(str(len(stage["ranks"])) for stage in plan["stages"]),
        micro_batches=plan["micro_batches"],
        updates=len(lead.steps),
        samples=sum(step["batch"] for step in lead.steps),
        accuracy=lead.evaluations[-1]["accuracy"],
        loss=lead.evaluations[-1]["loss"],
        epoch_seconds=statistics.median(walls.values()),
        samples_per_second=sum(step["batch"] for step in lead.settled) / sum(step["wall"] for step in lead.settled),
        compute=share["compute"],
        transfer=share["transfer"],
        wait=share["wait"],
        cpu_cores=cpu,
        rss_bytes=max(step["rss_bytes"] for step in everyone),
        idle_rss_bytes=max(rank.run["rss_idle_bytes"] for rank in run.ranks),
        bytes_per_step=sum(step["bytes_sent"] for step in everyone) / steps,
    )
