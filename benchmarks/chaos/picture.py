"""Draws a campaign: the samples over time, the faults, and how long each of them held the training up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from benchmarks.chaos.accounting import Span
from benchmarks.chaos.campaign import Result
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.report import briefly
from horizonml.report.charts import clock_axis, plain_axis, save
from horizonml.text import count, percent

_MARKS = {  # kind of fault: colour, marker
    "kill": ("#D55E00", "X"),
    "pause": ("#0072B2", "s"),
    "partition": ("#CC79A7", "D"),
    "oom": ("#E69F00", "^"),
    "disk": ("#009E73", "o"),
}
_OTHER = ("#555555", "P")
_STOPPED, _FEWER, _CALM = "#f7c5b8", "#fbe7c6", "#eef3f7"
_POINTS = 4000


def draw(result: Result, path: Path) -> Path:
    """Draw the campaign, and return the path."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    samples, faults = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, max(1.0, 0.3 * result.settings.ranks)))
    begin = min([result.faulted.begin, *(span.begin for span in result.references)])
    _bands(samples, result, begin)
    _curves(samples, result, begin)
    _ranks(faults, result, begin)
    figure.suptitle(_title(result), x=0.01, ha="left", weight="bold", size=12)
    _legends(figure, faults, result)
    return save(figure, path)


def _title(result: Result) -> str:
    kinds = f"{count(len(result.faults), 'fault')} in {briefly(result.faulted.seconds)}"
    return f"{result.settings.ranks} ranks, {kinds}: {percent(result.goodput, 1)} of the samples without faults"


def _bands(axis: Axes, result: Result, begin: float) -> None:
    """Draw when the training stood still, when it went on without a rank, and when nothing was done to it."""
    for span in result.references:
        axis.axvspan(span.begin - begin, span.end - begin, color=_CALM, linewidth=0)
    for found in result.aftermaths:
        start = found.fault.time - begin
        if found.stepped is not None:
            axis.axvspan(start, start + found.stepped, color=_STOPPED, linewidth=0)
        if found.stepped is not None and found.whole is not None:
            axis.axvspan(start + found.stepped, start + found.whole, color=_FEWER, linewidth=0)


def _curves(axis: Axes, result: Result, begin: float) -> None:
    """Draw the samples that were done, and those that would have been done without faults."""
    points = _thinned(result.points)
    times, samples = [time - begin for time, _ in points], [samples for _, samples in points]
    axis.plot(times, samples, color="#222222", linewidth=1.6, drawstyle="steps-post")
    faulted, at = result.faulted, dict(result.points)
    first = max((time for time, _ in result.points if time <= faulted.begin), default=None)
    speed = result.speed(*result.references)
    if first is not None and speed:
        base = at[first]
        ends = [faulted.begin - begin, faulted.end - begin]
        axis.plot(ends, [base, base + speed * faulted.seconds], color="#777777", linestyle="--", linewidth=1.2)
    axis.set_ylabel("samples")
    axis.set_ylim(bottom=0)
    plain_axis(axis)


def _ranks(axis: Axes, result: Result, begin: float) -> None:
    """Draw which rank was hit by what, and for how long."""
    for fault in result.faults:
        colour, marker = _MARKS.get(fault.kind, _OTHER)
        span = Span(fault.time - begin, fault.until - begin)
        axis.plot([span.begin, span.end], [fault.rank, fault.rank], color=colour, linewidth=3, alpha=0.5)
        filled = "full" if fault.struck else "none"
        axis.plot(span.begin, fault.rank, color=colour, marker=marker, markersize=7, linestyle="", fillstyle=filled)
    axis.set(ylabel="rank", xlabel="time (minutes:seconds)", ylim=(result.settings.ranks - 0.5, -0.5))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    end = max([result.faulted.end, *(span.end for span in result.references)]) - begin
    clock_axis(axis, end)


def _legends(figure: Figure, faults: Axes, result: Result) -> None:
    """Explain the marks beside the ranks, and everything else below."""
    marks = []
    for kind in FAULTS:
        colour, marker = _MARKS.get(kind, _OTHER)
        if any(fault.kind == kind for fault in result.faults):
            marks.append(Line2D([], [], color=colour, marker=marker, linestyle="", label=kind))
    faults.legend(handles=marks, loc="center left", bbox_to_anchor=(1.0, 0.5), borderaxespad=0.2, handletextpad=0.1)
    others: list[Artist] = [
        Line2D([], [], color="#222222", linewidth=1.6, label="samples done"),
        Line2D([], [], color="#777777", linestyle="--", label="without faults"),
        Patch(color=_STOPPED, label="no steps"),
        Patch(color=_CALM, label="no faults, for comparison"),
    ]
    if any(found.whole != found.stepped for found in result.aftermaths):
        others.insert(3, Patch(color=_FEWER, label="fewer ranks step"))
    figure.legend(handles=others, loc="outside lower center", ncols=len(others))


def _thinned(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return as many points as a picture can show, with those on both sides of a stop or a fall."""
    if len(points) <= _POINTS:
        return list(points)
    every = len(points) / _POINTS
    usual = (points[-1][0] - points[0][0]) / len(points)
    kept = []
    for number, point in enumerate(points):
        near = points[max(0, number - 1) : number + 2]
        stop = near[-1][0] - near[0][0] > 10 * usual or any(b[1] < a[1] for a, b in pairwise(near))
        if stop or number % every < 1:
            kept.append(point)
    return kept
