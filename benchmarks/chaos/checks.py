"""Finds what is wrong with ranks, and names each of them with its log."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from benchmarks.chaos.cluster import Cluster, Exit

_TRACEBACK = "Traceback (most recent call last)"


def missing(cluster: Cluster, members: Collection[int], when: str) -> list[str]:
    """Return why not all ranks step, rank by rank; `members` are those that are in the newest group."""
    found = []
    for rank in range(cluster.ranks):
        runs = cluster.exit_code(rank) is None
        if runs and rank in members:
            continue
        last = next((end for end in reversed(cluster.exits) if end.rank == rank), None)
        before = "" if last is None else f"; its last process {reason(cluster, last)}"
        state = "is not in the group" if runs else "does not run"
        found.append(f"rank {rank} {state} {when}{before} (its log: {cluster.log(rank)})")
    if not found:
        logs = ", ".join(str(cluster.log(rank)) for rank in range(cluster.ranks))
        steps = ", ".join(f"rank {rank} has finished step {_last_step(cluster, rank)}" for rank in range(cluster.ranks))
        found.append(f"all ranks run, but they have not finished a step together {when}: {steps} (their logs: {logs})")
    return found


def _last_step(cluster: Cluster, rank: int) -> str:
    """Return the last step that a rank has recorded."""
    steps = [int(record["step"]) for record in cluster.records(rank) if record.get("kind") == "step"]
    return f"{steps[-1]:,}" if steps else "none"


def deaths(cluster: Cluster, since: float) -> list[str]:
    """Return which ranks have died since a time, and why, where nothing was done to them."""
    return [
        f"rank {end.rank} {reason(cluster, end)}, although nothing was done to it (its log: {cluster.log(end.rank)})"
        for end in list(cluster.exits)
        if end.time > since
    ]


def reason(cluster: Cluster, end: Exit) -> str:
    """Return why a rank's process ended, in its own words if it said any."""
    said = _lines(cluster.log(end.rank))
    errors = [line for line in said if line.startswith("error: ")]
    return f"{end.reason} ({errors[-1].removeprefix('error: ')})" if errors and end.code > 0 else end.reason


def hung(cluster: Cluster) -> list[str]:
    """Return which ranks had to be killed in the end."""
    return [
        f"rank {rank} did not stop when it was asked to (its log says where it hangs: {cluster.log(rank)})"
        for rank in cluster.hung
    ]


def tracebacks(log_folder: Path) -> list[str]:
    """Return who printed a traceback, which no user should see, and where it is."""
    found = []
    for log in sorted(log_folder.glob("*.log")):
        first = next((number for number, line in enumerate(_lines(log), 1) if _TRACEBACK in line), None)
        if first is not None:
            found.append(f"{log.stem.replace('-', ' ')} printed a traceback ({log}, line {first})")
    return found


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
