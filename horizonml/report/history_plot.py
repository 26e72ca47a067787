"""Draws what a run did while ranks were lost and joined: its steps, its loss, and who was there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator

from horizonml.report.history import Change, Formed, History
from horizonml.report.records import Run
from horizonml.report.style import clock_axis, plain_axis, save, seconds_axis
from horizonml.text import count, human_seconds, percent

_STOPPED = "#f7c5b8"
_LOST, _JOINED, _THERE = "#000000", "#009E73", "#56B4E9"
_WINDOW = 8  # steps over which the loss is averaged


def changes(name: str, run: Run, path: Path) -> Path:
    """Draw the run over time, with every change of its group, and return the path."""
    return save(draw_changes(name, run), path)


def draw_changes(name: str, run: Run) -> Figure:
    """Draw what `changes` saves: of a job that was started several times, the newest time in which ranks changed."""
    groups, found = _newest(run.history)
    ranks = sorted({rank for group in groups for rank in group.parts})
    figure = Figure(figsize=(12, 5.6 + 0.22 * len(ranks)), layout="constrained")
    height = max(0.5, 0.2 * len(ranks))
    steps, loss, there = figure.subplots(3, 1, sharex=True, height_ratios=(1.6, 1.6, height))
    begin = groups[0].begin
    for axis in (steps, loss, there):
        for change in found:
            axis.axvspan(change.before - begin, change.after - begin, color=_STOPPED, linewidth=0)
            at = change.before if _is_loss(change) else change.after
            _line(axis, change, at - begin, _width(found))
    _draw_steps(steps, loss, groups, begin)
    _draw_ranks(there, groups, found, ranks, begin)
    clock_axis(there, groups[-1].end - begin)
    figure.suptitle(_title(name, run.history), x=0.01, ha="left", weight="bold", size=12)
    figure.legend(handles=_legend(found), loc="outside lower center", ncols=5)
    return figure


def mark_steps(axis: Axes, found: Sequence[Change]) -> list[Artist]:
    """Mark the steps at which the group changed on an axis of steps, and return what the marks are called."""
    for change in found:
        _line(axis, change, change.step - 0.5, _width(found))
    return _marks(found)


def _newest(history: History) -> tuple[list[Formed], list[Change]]:
    """Return the groups of the newest attempt in which the group changed, and its changes."""
    ends = 0
    chosen: tuple[list[Formed], list[Change]] = ([], [])
    for groups in history.attempts:
        begins, ends = ends, ends + len(groups) - 1
        if ends > begins:
            chosen = groups, history.changes[begins:ends]
    return chosen


def _title(name: str, history: History) -> str:
    stopped = f"no steps for {human_seconds(history.stopped)} of {human_seconds(history.seconds)}"
    repeated = f"{count(history.steps_repeated, 'step')} repeated"
    happened = f"{count(history.lost, 'loss')} and {count(history.joined, 'join')} of ranks"
    return f"{name}: {happened}; {stopped}, {repeated}; goodput {percent(history.goodput, 1)}"


def _is_loss(change: Change) -> bool:
    return bool(change.lost or change.left)


def _width(found: Sequence[Change]) -> float:
    """Return how wide lines may be, so that many of them do not hide what is below them."""
    return max(0.3, min(1.2, 16 / len(found)))


def _line(axis: Axes, change: Change, at: float, width: float) -> None:
    colour, style = (_LOST, "--") if _is_loss(change) else (_JOINED, ":")
    axis.axvline(at, color=colour, linestyle=style, linewidth=width, zorder=1.5)


def _marks(found: Sequence[Change]) -> list[Artist]:
    handles: list[Artist] = []
    if any(map(_is_loss, found)):
        handles.append(Line2D([], [], color=_LOST, linestyle="--", linewidth=1.2, label="a rank is lost or leaves"))
    if not all(map(_is_loss, found)):
        handles.append(Line2D([], [], color=_JOINED, linestyle=":", linewidth=1.2, label="a rank joins"))
    return handles


def _legend(found: Sequence[Change]) -> list[Artist]:
    return [*_marks(found), Patch(color=_STOPPED, label="no steps"), Patch(color=_THERE, label="rank is in the group")]


def _draw_steps(wall: Axes, loss: Axes, groups: Sequence[Formed], begin: float) -> None:
    for group in groups:
        times = [step.time - begin for step in group.steps]
        wall.plot(times, [step.wall for step in group.steps], ".", color="#222222", markersize=2.5, alpha=0.5)
        loss.plot(times, _mean([step.loss for step in group.steps]), color="#222222", linewidth=1.2)
    wall.set(title="Time of each step", yscale="log")
    seconds_axis(wall)
    loss.set(title=f"Training loss, mean of {_WINDOW} steps", yscale="log")
    plain_axis(loss)
    for axis in (wall, loss):
        few = math.log10(axis.get_ylim()[1] / axis.get_ylim()[0]) < 3
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        axis.minorticks_off()


def _mean(values: Sequence[float]) -> list[float]:
    parts = [values[max(0, end - _WINDOW) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def _draw_ranks(
    axis: Axes, groups: Sequence[Formed], found: Sequence[Change], ranks: Sequence[int], begin: float
) -> None:
    """Draw a bar for as long as a rank is in the group, and a cross where it is lost."""
    rows = {rank: row for row, rank in enumerate(ranks)}
    ends = [*(old.end for old, _ in pairwise(groups)), groups[-1].end]
    for group, end in zip(groups, ends, strict=True):
        for rank in group.parts:
            axis.barh(rows[rank], end - group.begin, 0.55, group.begin - begin, color=_THERE)
    size = 7 if len(found) <= 24 else 4
    for change in found:
        gone = [rank for rank in (*change.lost, *change.left) if rank in rows]
        axis.plot([change.before - begin] * len(gone), [rows[rank] for rank in gone], "X", color=_LOST, markersize=size)
    axis.set(title="Ranks in the group", xlabel="time since the first step (minutes:seconds)", ylabel="rank")
    axis.set_ylim(len(ranks) - 0.4, -0.6)
    axis.grid(visible=False, axis="y")
    if len(ranks) <= 12:
        axis.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    else:
        axis.yaxis.set_major_locator(MaxNLocator(8, integer=True))
