"""Sums up the runs in a folder: for `horizonml ls`, and for the page of all runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from horizonml.report.live import LiveRun
from horizonml.report.live_facts import RunState
from horizonml.text import printable

_GOES_ON = (RunState.RUNNING, RunState.WAITING)


@dataclass(frozen=True)
class RunSummary:
    """How a run stands, in a line."""

    folder: str
    state: RunState
    step: int
    steps: int | None  # of the whole run
    loss: float | None  # on held-out data, or of the last batch
    accuracy: float | None
    devices: int
    ranks: int
    seconds: float  # since it began, or since it ended


def is_run(path: Path) -> bool:
    """Return whether a folder is that of a run."""
    return (path / ".horizonml-run").exists() or any(path.glob("rank-*.jsonl"))


def runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder, the newest first."""
    inside = folder.iterdir() if folder.is_dir() else ()
    return sorted((one for one in inside if one.is_dir() and is_run(one)), key=written, reverse=True)


def written(path: Path) -> float:
    """Return when the newest record of a run was written, in seconds since 1970."""
    return max((file.stat().st_mtime for file in path.glob("rank-*.jsonl")), default=path.stat().st_mtime)


class Runs:
    """Follows the runs in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.known: dict[str, LiveRun] = {}  # by the name of the folder

    def poll(self) -> list[RunSummary]:
        """Read what was recorded since the last call, and return how all runs stand, the newest first."""
        paths = runs_in(self._folder)
        self.known = {path.name: self.known.get(path.name) or LiveRun(path) for path in paths}
        found = []
        for path, run in zip(paths, self.known.values(), strict=True):
            run.poll()
            found.append(_summary(path, run))
        return found


def _summary(path: Path, run: LiveRun) -> RunSummary:
    members, state = run.members, run.state
    began = run.events[0].time if run.events and state in _GOES_ON else written(path)
    loss = run.evaluations[-1].loss if run.evaluations else run.newest.loss if run.newest is not None else None
    return RunSummary(
        printable(str(path), 200),
        state,
        run.step,
        run.total_steps,
        loss,
        run.accuracy,
        len({one.node or one.host for one in members}),
        len(members),
        max(0.0, time.time() - began),
    )
