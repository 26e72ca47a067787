"""Draws runs: how they learned, where their time went, a step of a pipeline, and losses and joins of ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogFormatter, LogLocator, MaxNLocator

from horizonml.plan.plan import Plan
from horizonml.planner.simulate import Prediction
from horizonml.report.charts import (
    TIME_COLOURS,
    clock_axis,
    percent_axis,
    plain_axis,
    save,
    seconds_axis,
    series_styles,
)
from horizonml.report.records import Change, History, RankRecords, RecordedRun, TrainedGroup
from horizonml.telemetry.record import RecordedSpan
from horizonml.text import count, human_seconds, percent

_WORK = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "backward-input": "#0072B2",
    "backward-weight": "#CC79A7",
    "update": "#009E73",
    "prepare": "#a6cee3",
    "load": "#cab2d6",
}
_MARKERS = 40  # points of a line, above which their markers would hide it
_LEAST = 0.003  # of the picture's width, so that nothing is too short to be seen


class _Plain(LogFormatter):
    """Labels the same minor ticks as matplotlib does, as 0.3 and not as 3e-01."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return the label of a tick, which may be empty."""
        return f"{x:g}" if super().__call__(x, pos) else ""


def draw_learning_curves(runs: Mapping[str, RecordedRun]) -> Figure:
    """Draw training loss per step, and held-out loss and accuracy per evaluation.

    Language models have their perplexity in place of the accuracy, and the unigram baseline beside it.
    Where there is only one run, its loss shows at which steps ranks were lost and joined.
    """
    figure = Figure(figsize=(12, 4.1), layout="constrained")
    loss, held_out, last = figure.subplots(1, 3)
    of_texts = any(one.perplexity is not None for run in runs.values() for one in run.evaluations)
    within = any(one.within_epoch for run in runs.values() for one in run.evaluations)
    for name, own_style in series_styles(runs).items():
        steps, evaluations = runs[name].steps, runs[name].evaluations
        style: dict[str, str | float] = {"color": own_style.colour, "linestyle": own_style.line}
        loss.plot([s.step for s in steps], _mean([s.loss for s in steps]), label=name, **style)
        when = [e.step if within else e.epoch for e in evaluations]
        if len(when) <= _MARKERS:
            style |= {"marker": own_style.marker, "markersize": 4}
        held_out.plot(when, [e.loss for e in evaluations], **style)
        values = [e.perplexity if of_texts else e.accuracy for e in evaluations]
        judged = [(place, value) for place, value in zip(when, values, strict=True) if value is not None]
        last.plot([place for place, _ in judged], [value for _, value in judged], **style)
    loss.set(title="Training loss (cross-entropy)", xlabel="step", yscale="log")
    unit = "step" if within else "epoch"
    held_out.set(title="Held-out loss (cross-entropy)", xlabel=unit, yscale="log")
    last.set(title="Held-out perplexity" if of_texts else "Held-out accuracy (%)", xlabel=unit)
    if of_texts:
        _mark_baselines(last, runs)
    else:
        percent_axis(last)
    for axis in (held_out, last):
        if not any(len(line.get_xydata()) for line in axis.lines):
            axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color="#777777")
            axis.set_yscale("linear")
            axis.set(xticks=[], yticks=[])
            continue
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    for axis in (loss, held_out):
        if axis.get_yscale() != "log":
            continue
        plain_axis(axis)
        axis.yaxis.set_minor_formatter(_Plain())
    marks = mark_steps(loss, next(iter(runs.values())).history.changes) if len(runs) == 1 else []
    handles = [*loss.get_legend_handles_labels()[0], *marks]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(7, len(handles)))
    return figure


def _mark_baselines(axis: Axes, runs: Mapping[str, RecordedRun]) -> None:
    baselines = {run.lead.run.unigram for run in runs.values() if run.lead.run.unigram is not None}
    reached = {one.perplexity for run in runs.values() for one in run.evaluations if one.perplexity is not None}
    axis.set_ylim(0, 1.1 * max(baselines | reached))
    for value in sorted(baselines):
        axis.axhline(value, color="#555555", linestyle=":", linewidth=1.2)
        label = f"unigram baseline {value:.1f}"
        axis.annotate(label, (0.98, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", size=9)


def time_split(runs: Mapping[str, RecordedRun], path: Path) -> Path:
    """Draw where the time of an average step goes, for every rank of several runs, and return the path."""
    widths = [len(run.ranks) + 1 for run in runs.values()]
    everyone = [rank for run in runs.values() for rank in run.ranks]
    figure = Figure(figsize=(max(6.0, 0.55 * sum(widths) + 2), 4), layout="constrained")
    axes = figure.subplots(1, len(runs), sharey=True, width_ratios=widths, squeeze=False)[0]
    for axis, (name, run) in zip(axes, runs.items(), strict=True):
        bottom = [0.0] * len(run.ranks)
        for kind, colour in TIME_COLOURS.items():
            heights = [1000 * sum(s.seconds(kind) for s in rank.settled) / len(rank.settled) for rank in run.ranks]
            hatch = {"wait": "///", "transfer": ".."}.get(kind)
            ranks = [str(rank.run.rank) for rank in run.ranks]
            axis.bar(ranks, heights, 0.75, bottom, color=colour, hatch=hatch, edgecolor="white", label=kind)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        for place, total in enumerate(bottom):
            axis.annotate(
                f"{total:.3g}", (place, total), xytext=(0, 2), textcoords="offset points", ha="center", size=8
            )
        axis.set(title=name, xlabel="rank")
        axis.grid(visible=False, axis="x")
    figure.suptitle("Where the time of an average step goes", x=0.01, ha="left", weight="bold", size=12)
    axes[0].set_ylabel("milliseconds per step, mean")
    axes[0].set_ylim(top=1.08 * max(sum(s.wall for s in r.settled) / len(r.settled) * 1000 for r in everyone))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return save(figure, path)


def timeline(name: str, run: RecordedRun, path: Path) -> Path | None:
    """Draw one step of a pipeline, rank by rank, with its micro-batches and its bubbles.

    Return the path, or None if no step was recorded.
    """
    number = recorded_step(run)
    if number is None:
        return None
    figure = Figure(figsize=(12, 0.62 * len(run.ranks) + 1.9), layout="constrained")
    axis = figure.subplots()
    work = draw_timeline(axis, run, number, [_rank_label(rank) for rank in run.ranks])
    axis.set_title(f"{name}: step {number}, {run.lead.run.plan.schedule}; numbers are micro-batches")
    handles = legend(work)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return save(figure, path)


def recorded_step(run: RecordedRun) -> int | None:
    """Return the most usual of the steps of which every rank recorded what it did when."""
    common = set.intersection(*({line.step for line in rank.timelines} for rank in run.ranks))
    walls = {step.step: step.wall for step in run.lead.settled}
    usual = statistics.median(walls.values())
    return min(common, key=lambda number: (abs(walls.get(number, math.inf) - usual), -number), default=None)


def draw_timeline(axis: Axes, run: RecordedRun, number: int, labels: Sequence[str]) -> set[str]:
    """Draw a recorded step, a row for each rank, and return the names of the work that was computed in it."""
    rows = [next(line.spans for line in rank.timelines if line.step == number) for rank in run.ranks]
    start = min(spans[0].begin for spans in rows)
    axis.set_xlim(0, 1000 * (max(spans[-1].end for spans in rows) - start))
    for row, spans in enumerate(rows):
        for span in spans:
            _draw_span(axis, row, span._replace(begin=span.begin - start, end=span.end - start))
    _finish(axis, labels)
    return {span.what for spans in rows for span in spans if span.kind == "compute"}


def legend(work: Collection[str], wait: bool = True) -> list[Patch]:
    """Return the legend of a step's colours; `work` names what was computed in it."""
    handles = [Patch(color=colour, label=name) for name, colour in _WORK.items() if name in work]
    handles.append(Patch(color=TIME_COLOURS["transfer"], label="transfer"))
    if wait:
        handles.append(Patch(facecolor="#f2f2f2", edgecolor="#bfbfbf", hatch="///", label="wait (bubble)"))
    return handles


def predicted(plan: Plan, prediction: Prediction, names: Sequence[str], path: Path) -> Path:
    """Draw one step of a plan as it is predicted, rank by rank, and return the path; `names` are the ranks' devices.

    Below what a rank computes lies what its link carries meanwhile. However little a device does, it can be seen, and
    so can those that the plan leaves out.
    """
    order = list(dict.fromkeys((*(rank for stage in plan.stages for rank in stage.ranks), *plan.spare)))
    figure = Figure(figsize=(12, 0.66 * len(order) + 1.9), layout="constrained")
    axis = figure.subplots()
    axis.set_xlim(0, 1000 * prediction.seconds)
    for span in prediction.spans:
        line = RecordedSpan("compute", span.kind, span.micro, span.begin, span.end)
        _draw_span(axis, order.index(span.rank), line, lane=(-0.12, 0.5))
    for sender, _, begin, end in prediction.messages:
        _draw_span(axis, order.index(sender), RecordedSpan("transfer", "send", -1, begin, end), lane=(0.26, 0.18))
    labels = []
    for rank in order:
        if rank in plan.spare:
            labels.append(f"{names[rank]}: left out,\nas it would slow the others down")
            continue
        stages = [plan.stages[number] for number in plan.stages_of(rank)]
        layers = ", ".join(f"{s.start} to {s.stop - 1}" if s.stop - s.start > 1 else str(s.start) for s in stages)
        layers = f"layer{'s' * (' ' in layers)} {layers}"
        busy = prediction.computing[rank] / prediction.seconds
        labels.append(f"{names[rank]}: {layers}\ncomputes {min(1.0, busy):.0%} of the time")
    _finish(axis, labels)
    spare = f"; {count(len(plan.spare), 'rank')} left out" if plan.spare else ""
    axis.set_title(
        f"Predicted: {1000 * prediction.seconds:,.0f} ms a step, {plan.schedule}; numbers are micro-batches{spare}",
    )
    kinds = {str(span.kind) for span in prediction.spans}
    handles = legend(kinds, wait=False)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return save(figure, path)


def _finish(axis: Axes, labels: Sequence[str]) -> None:
    axis.grid(visible=False)
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.set_xlabel("milliseconds")


def _rank_label(rank: RankRecords) -> str:
    name = f"rank {rank.run.rank}"
    return f"{name} (stage {rank.run.stage})" if len(rank.run.plan.stages) > 1 else name


def _draw_span(axis: Axes, row: int, span: RecordedSpan, lane: tuple[float, float] = (0.0, 0.7)) -> None:
    """Draw what a rank did, in milliseconds; `lane` is its place within the row, and its height."""
    kind, what, micro, begin, end = span.kind, span.what, span.micro, 1000 * span.begin, 1000 * span.end
    low, high = axis.get_xlim()
    place, height = row + lane[0], lane[1]
    if kind == "wait":
        axis.barh(place, end - begin, height, begin, color="#f2f2f2", edgecolor="#bfbfbf", hatch="///", linewidth=0)
        return  # others are drawn over it
    width = end - begin if what == "prepare" else max(end - begin, _LEAST * (high - low))
    colour = TIME_COLOURS["transfer"] if kind == "transfer" else _WORK.get(what, _WORK["prepare"])
    axis.barh(place, width, height, begin, color=colour, edgecolor="white", linewidth=0.3, zorder=2.5)
    if kind == "compute" and micro >= 0 and width > 0.012 * max(1e-9, high - low):
        axis.text(begin + width / 2, place, str(micro), ha="center", va="center", color="white", fontsize=8)


_STOPPED = "#f7c5b8"
_LOST, _JOINED, _THERE = "#000000", "#009E73", "#56B4E9"
_WINDOW = 8  # steps over which the loss is averaged


def draw_changes(name: str, run: RecordedRun) -> Figure:
    """Draw the run over time, with every change of its group.

    Of a job that was started several times, it is the newest time in which ranks changed.
    """
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


def _newest(history: History) -> tuple[list[TrainedGroup], list[Change]]:
    """Return the groups of the newest attempt in which the group changed, and its changes."""
    ends = 0
    chosen: tuple[list[TrainedGroup], list[Change]] = ([], [])
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


def _draw_steps(wall: Axes, loss: Axes, groups: Sequence[TrainedGroup], begin: float) -> None:
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
    axis: Axes, groups: Sequence[TrainedGroup], found: Sequence[Change], ranks: Sequence[int], begin: float
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
