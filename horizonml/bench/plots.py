"""Pictures of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from horizonml.bench.results import RankRecords, Run
from horizonml.engine.clock import KINDS

mpl.rcParams.update(
    {
        "figure.dpi": 110,
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e6e6e6",
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "legend.frameon": False,
    }
)
# Colours that people with colour blindness can tell apart (Okabe and Ito).
_RUNS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000"]
_KINDS = {"compute": "#0072B2", "transfer": "#E69F00", "wait": "#d9d9d9"}
_WORK = {"forward": "#56B4E9", "backward": "#0072B2", "update": "#009E73", "prepare": "#a6cee3"}


def learning_curves(runs: Sequence[Run], path: Path) -> None:
    """Training loss per step, and held-out loss and accuracy per epoch, of several runs."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    loss, held_out, accuracy = figure.subplots(1, 3)
    for run, colour in zip(runs, _RUNS, strict=False):
        steps, evaluations = run.lead.steps, run.lead.evaluations
        loss.plot([s["step"] for s in steps], _smooth([s["loss"] for s in steps]), color=colour, label=run.name)
        epochs = [e["epoch"] for e in evaluations]
        held_out.plot(epochs, [e["loss"] for e in evaluations], color=colour, marker="o", markersize=3.5)
        accuracy.plot(epochs, [100 * e["accuracy"] for e in evaluations], color=colour, marker="o", markersize=3.5)
    loss.set(title="Training loss", xlabel="step", yscale="log")
    held_out.set(title="Held-out loss", xlabel="epoch", yscale="log")
    accuracy.set(title="Held-out accuracy (%)", xlabel="epoch")
    loss.legend()
    figure.savefig(path)


def _smooth(values: list[float], window: int = 8) -> list[float]:
    """A running mean."""
    return [
        sum(values[max(0, i - window + 1) : i + 1]) / len(values[max(0, i - window + 1) : i + 1])
        for i in range(len(values))
    ]


def time_split(runs: Sequence[Run], path: Path) -> None:
    """Where the time of an average step goes, for every rank of several runs, in milliseconds."""
    widths = [len(run.ranks) + 1 for run in runs]
    figure = Figure(figsize=(max(6.0, 0.55 * sum(widths) + 2), 4), layout="constrained")
    axes = figure.subplots(1, len(runs), sharey=True, width_ratios=widths, squeeze=False)[0]
    for axis, run in zip(axes, runs, strict=True):
        bottom = [0.0] * len(run.ranks)
        for kind in KINDS:
            heights = [1000 * sum(s[kind] for s in rank.settled) / len(rank.settled) for rank in run.ranks]
            hatch = "///" if kind == "wait" else None
            names = [str(rank.run["rank"]) for rank in run.ranks]
            axis.bar(names, heights, 0.75, bottom, color=_KINDS[kind], hatch=hatch, edgecolor="white", label=kind)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axis.set(title=run.name, xlabel="rank")
        axis.grid(visible=False, axis="x")
    axes[0].set_ylabel("milliseconds per step")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path)


def timeline(run: Run, path: Path) -> bool:
    """One step of a pipeline, rank by rank, with its micro-batches and its bubbles; False if none was recorded."""
    common = set.intersection(*({line["step"] for line in rank.timelines} for rank in run.ranks))
    if not common:
        return False
    number = max(common)
    rows = [next(line["spans"] for line in rank.timelines if line["step"] == number) for rank in run.ranks]
    start = min(spans[0][3] for spans in rows)
    figure = Figure(figsize=(12, 0.62 * len(rows) + 1.9), layout="constrained")
    axis = figure.subplots()
    axis.grid(visible=False)
    for row, spans in enumerate(rows):
        for kind, what, micro, begin, end in spans:
            _draw_span(axis, row, kind, what, micro, 1000 * (begin - start), 1000 * (end - start))
    axis.set_yticks(range(len(rows)), [_rank_label(rank) for rank in run.ranks])
    axis.invert_yaxis()
    axis.set(
        title=f"{run.name}: step {number}, {run.lead.run['plan']['schedule']}; numbers are micro-batches",
        xlabel="milliseconds",
    )
    handles = [Patch(color=_WORK[name], label=name) for name in ("forward", "backward", "update", "prepare")]
    handles += [
        Patch(color=_KINDS["transfer"], label="transfer"),
        Patch(facecolor="#f2f2f2", edgecolor="#bfbfbf", hatch="///", label="wait (bubble)"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.savefig(path)
    return True


def _rank_label(rank: RankRecords) -> str:
    stages = rank.run["plan"]["stages"]
    name = f"rank {rank.run['rank']}"
    return f"{name} (stage {rank.run['stage']})" if len(stages) > 1 else name


def _draw_span(axis: Axes, row: int, kind: str, what: str, micro: int, begin: float, end: float) -> None:
    width = end - begin
    if kind == "wait":
        axis.barh(row, width, 0.7, begin, color="#f2f2f2", edgecolor="#bfbfbf", hatch="///", linewidth=0)
        return
    colour = _KINDS["transfer"] if kind == "transfer" else _WORK.get(what, _WORK["prepare"])
    axis.barh(row, width, 0.7, begin, color=colour, edgecolor="white", linewidth=0.5)
    low, high = axis.get_xlim()
    if kind == "compute" and micro >= 0 and width > 0.012 * max(1e-9, high - low):
        axis.text(begin + width / 2, row, str(micro), ha="center", va="center", color="white", fontsize=8)
