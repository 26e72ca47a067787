"""Draws charts of measured numbers: bars, lines and a radar, with the spread of repeats.

All pictures look alike, and are readable in print and by the colour-blind: the colours are those of Okabe and Ito,
"Color Universal Design" (2008), and markers and hatches repeat what they say.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.projections.polar import PolarAxes
from matplotlib.ticker import LogLocator, MaxNLocator, MultipleLocator

from horizonml.engine.clock import Kind
from horizonml.files import writing
from horizonml.text import human_bytes, human_seconds, percent

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
        "hatch.linewidth": 0.6,
    }
)


class SeriesStyle(NamedTuple):
    """The colour, marker, line and hatch of one series."""

    colour: str
    marker: str
    line: str
    hatch: str


_STRATEGIES = {
    "single": SeriesStyle("#000000", "o", "-", ""),
    "ddp": SeriesStyle("#0072B2", "s", "-", "//"),
    "pipeline": SeriesStyle("#E69F00", "^", "-", "\\\\"),
    "hybrid": SeriesStyle("#009E73", "D", "-", ".."),
    "tensor": SeriesStyle("#CC79A7", "v", "--", "xx"),
    "horovod": SeriesStyle("#56B4E9", "P", "--", "++"),
    "auto": SeriesStyle("#D55E00", "X", "-", "oo"),
}
_OTHERS = [style._replace(line=":") for style in reversed(_STRATEGIES.values())]
TIME_COLOURS: dict[Kind, str] = {"compute": "#0072B2", "transfer": "#E69F00", "wait": "#d9d9d9"}


def series_styles(names: Iterable[str]) -> dict[str, SeriesStyle]:
    """Return a style for each name: the strategies have their own, always the same."""
    others, unique = iter(_OTHERS * 10), list(dict.fromkeys(names))
    found = {name: _STRATEGIES.get(name) or next(others) for name in unique}
    return found if len(found) > 1 else {name: style._replace(line="-") for name, style in found.items()}


AxisFormat = Callable[[Axes], None]


class _BinaryLocator(MaxNLocator):
    """Places ticks at round numbers of KiB, MiB or GiB."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        unit = next((2.0**power for power in (30, 20, 10) if vmax >= 2 * 2.0**power), 1.0)
        return [tick * unit for tick in super().tick_values(vmin / unit, vmax / unit)]


def bytes_axis(axis: Axes, per: str = "") -> None:
    """Label the y axis in KiB, MiB, ..."""
    axis.yaxis.set_major_locator(_BinaryLocator(7))
    axis.yaxis.set_major_formatter(lambda value, _: f"{_bytes(value)}{per}")


def byte_rate_axis(axis: Axes) -> None:
    """Label the y axis in KiB/s, MiB/s, ..."""
    bytes_axis(axis, "/s")


def _bytes(value: float) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if value >= 2.0**power:
            return f"{_short(value / 2.0**power)} {unit}"
    return human_bytes(value).replace(".0 ", " ")


def _short(value: float) -> str:
    """Return a number with three digits that count: 1,234 and 99.6 and 0.0123."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def label(axis: Axes, value: float) -> str:
    """Return a value as the y axis would show it, with its unit."""
    return str(axis.yaxis.get_major_formatter()(value, None))


def _labelled(show: Callable[[float], str]) -> AxisFormat:
    """Return what labels the y axis of a panel by `show`."""
    return lambda axis: axis.yaxis.set_major_formatter(lambda value, _: show(value))


seconds_axis = _labelled(lambda value: human_seconds(value).replace(".0 ", " "))  # in ms, s, min
share_axis = _labelled(percent)  # in percent, as tables do
percent_axis = _labelled(lambda value: f"{_short(100 * value)}%")  # in percent, with three digits that count
plain_axis = _labelled(_short)  # with thousands separated


_CLOCK_TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)  # seconds


def clock_axis(axis: Axes, end: float) -> None:
    """Label the x axis, which begins at 0 and ends at `end` seconds, in minutes and seconds."""
    axis.set_xlim(0, end)
    tick = next((tick for tick in _CLOCK_TICKS if end / tick <= 12), _CLOCK_TICKS[-1])
    axis.xaxis.set_major_locator(MultipleLocator(tick))
    axis.xaxis.set_major_formatter(lambda value, _: "{}:{:02}".format(*divmod(round(value), 60)))


def save(figure: Figure, path: Path) -> Path:
    """Write a picture. Raises JobError."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return path


Values = Mapping[str, Mapping[str, Sequence[float]]]  # series -> category -> one value per repeat


def middle(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and how far the smallest and the largest repeat lie from it."""
    centre = statistics.median(values)
    return centre, centre - min(values), max(values) - centre


def bars(panels: Sequence[tuple[str, Values, AxisFormat]], path: Path, *, category: str = "", columns: int = 3) -> Path:
    """Draw panels of bars, grouped by category, with error bars where there are repeats, and return the path.

    Each panel is (title with its unit, values, format of the axis); `category` names what the categories are.
    """
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.3 * columns, 3.1 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (title, values, form) in zip(axes, panels, strict=False):
        _bar_panel(axis, title, values, form, category)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    if any(len(_categories(values)) > 1 for _, values, _ in panels):
        _share_legend(figure, axes[: len(panels)])
    return save(figure, path)


def _share_legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """Draw one legend for all panels."""
    handles: dict[str, Artist] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=min(7, len(handles)))


def _categories(values: Values) -> list[str]:
    return list(dict.fromkeys(name for series in values.values() for name in series))


def _bar_panel(axis: Axes, title: str, values: Values, form: AxisFormat, category: str) -> None:
    categories = _categories(values)
    width = 0.8 / max(1, len(values))
    ticks: dict[float, str] = {}
    tops: list[tuple[float, float, float]] = []  # of each bar: where it is, its value, and where its error bar ends
    for place, (series, own_style) in enumerate(series_styles(values).items()):
        shown = [(index, values[series][name]) for index, name in enumerate(categories) if values[series].get(name)]
        centres = [middle(repeats) for _, repeats in shown]
        places = [index + (place - (len(values) - 1) / 2) * width for index, _ in shown]
        ticks.update(dict.fromkeys(places, series))
        tops += [(at, centre, centre + above) for at, (centre, _, above) in zip(places, centres, strict=True)]
        axis.bar(
            places,
            [centre for centre, _, _ in centres],
            width * 0.92,
            yerr=_errors(centres),
            capsize=2,
            error_kw={"ecolor": "#555555", "elinewidth": 1},
            color=own_style.colour,
            edgecolor="white",
            hatch=own_style.hatch,
            linewidth=0.5,
            label=series,
        )
    axis.set_xticks(range(len(categories)), categories)
    axis.set(title=title, xlabel=category if len(categories) > 1 else "")
    axis.grid(visible=False, axis="x")
    if len(categories) == 1:
        axis.set_xticks(list(ticks), list(ticks.values()), fontsize=9 if len(ticks) < 6 else 7.5)
    form(axis)
    axis.set_ylim(0, (1.14 if len(tops) <= 6 else 1.4) * max((top for _, _, top in tops), default=0) or 1)
    for at, value, top in tops:
        rotation, size = (0, 8) if len(tops) <= 6 else (90, 7)
        _write(axis, label(axis, value), (at, top), (0, 2), "center", "bottom", fontsize=size, rotation=rotation)


def ranking(values: Mapping[str, Sequence[float]], path: Path, *, title: str, own: str, unit: str) -> Path:
    """Draw a bar for each name, with error bars, and return the path. Names that begin with `own` stand out."""
    figure = Figure(figsize=(9, 0.42 * len(values) + 1.3), layout="constrained")
    draw_ranking(figure.subplots(), values, title=title, own=own, text=lambda value: f"{value:,.0f} {unit}")
    return save(figure, path)


def draw_ranking(
    axis: Axes, values: Mapping[str, Sequence[float]], *, title: str, own: str, text: Callable[[float], str]
) -> None:
    """Draw bars from left to right, each with its value as `text` puts it."""
    centres = [middle(repeats) for repeats in values.values()]
    axis.barh(
        list(values),
        [centre for centre, _, _ in centres],
        0.66,
        xerr=_errors(centres),
        capsize=2,
        error_kw={"ecolor": "#555555", "elinewidth": 1},
        color=["#0072B2" if name.startswith(own) else "#c9c9c9" for name in values],
    )
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.set_title(title, loc="left")
    axis.set_xlim(0, 1.16 * max(centre + above for centre, _, above in centres))
    axis.xaxis.set_major_formatter(lambda value, _: text(value))
    for row, (name, (centre, _, above)) in enumerate(zip(values, centres, strict=True)):
        weight = "bold" if name.startswith(own) else "normal"
        _write(axis, text(centre), (centre + above, row), (5, 0), "left", "center", fontsize=9, fontweight=weight)


def _write(
    axis: Axes, text: str, at: tuple[float, float], off: tuple[float, float], ha: str, va: str, **text_style: Any
) -> None:
    """Write something beside a point, `off` by so many points of print."""
    axis.annotate(text, at, xytext=off, textcoords="offset points", ha=ha, va=va, **text_style)


def _errors(centres: Sequence[tuple[float, float, float]]) -> np.ndarray | None:
    errors = np.array([(low, high) for _, low, high in centres]).T
    return errors if errors.size and errors.max() > 0 else None


Lines = tuple[str, Mapping[str, Mapping[int, Sequence[float]]], AxisFormat]  # title, values of each series, axis


def draw_lines(
    panels: Sequence[Lines], x: str, ideals: Sequence[Mapping[str, Mapping[int, float]]] = (), logarithmic: int = 0
) -> Figure:
    """Draw panels of lines over numbers, with error bars.

    `ideals[i]` are up to two lines of panel i, by their names: what would be ideal, and a limit, which is shaded from
    above. The first `logarithmic` panels have a logarithmic y axis, too.
    """
    figure = Figure(figsize=(4.6 * len(panels), 4.0), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for number, (axis, (title, values, form)) in enumerate(zip(axes, panels, strict=True)):
        own = ideals[number] if number < len(ideals) else {}
        for (name, points), (style, colour) in zip(own.items(), (("--", "#888888"), ("-", "#333333")), strict=False):
            axis.plot(list(points), list(points.values()), color=colour, linestyle=style, linewidth=1.4, label=name)
        ticks: set[float] = set()
        for series, own_style in series_styles(values).items():
            xs = sorted(values[series])
            centres = [middle(values[series][at]) for at in xs]
            axis.errorbar(
                xs,
                [centre for centre, _, _ in centres],
                yerr=_errors(centres),
                color=own_style.colour,
                marker=own_style.marker,
                linestyle=own_style.line,
                markersize=5,
                capsize=2,
                label=series,
            )
            ticks |= set(xs)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
        axis.minorticks_off()
        axis.set(title=title, xlabel=x)
        form(axis)
        if number < logarithmic:
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_locator(LogLocator(base=2))
            form(axis)
        else:
            axis.set_ylim(bottom=0)
        if len(own) > 1:
            limit = list(own.values())[-1]
            top = axis.get_ylim()[1]
            axis.fill_between(list(limit), list(limit.values()), top, color="#000000", alpha=0.06, linewidth=0)
            axis.set_ylim(top=top)
    _share_legend(figure, axes)
    return figure


def radar(values: Mapping[str, Mapping[str, float]], path: Path, title: str) -> Path:
    """Draw a radar of values from 0 (centre) to 1 (rim), by series and axis, and return the path."""
    axes = list(next(iter(values.values())))
    angles = [2 * math.pi * index / len(axes) for index in range(len(axes))]
    figure = Figure(figsize=(8.2, 6.2), layout="constrained")
    axis = figure.subplots(subplot_kw={"projection": "polar"})
    assert isinstance(axis, PolarAxes)
    axis.set_theta_offset(math.pi / 2)
    axis.set_theta_direction(-1)
    for series, own_style in series_styles(values).items():
        shown = [max(0.0, min(1.0, values[series][name])) for name in axes]
        axis.plot(
            [*angles, angles[0]], [*shown, shown[0]], color=own_style.colour, marker=own_style.marker,
            linestyle=own_style.line, linewidth=1.8, markersize=5, label=series,
        )  # fmt: skip
        axis.fill(angles, shown, color=own_style.colour, alpha=0.06)
    axis.set_xticks(angles, axes)
    for name, angle in zip(axis.get_xticklabels(), angles, strict=True):
        across, up = math.sin(angle), math.cos(angle)
        name.set_horizontalalignment("center" if abs(across) < 0.1 else "left" if across > 0 else "right")
        name.set_verticalalignment("center" if abs(up) < 0.1 else "bottom" if up > 0 else "top")
    axis.tick_params(axis="x", pad=4)
    axis.set_ylim(0, 1)
    axis.set_yticks([0.25, 0.5, 0.75, 1.0], ["0.25", "0.5", "0.75", "1"], color="#777777", fontsize=8)
    axis.set_title(title, pad=24)
    figure.legend(loc="outside lower center", ncols=len(values))
    return save(figure, path)


def straight_line(points: Mapping[int, float]) -> tuple[float, float]:
    """Return the slope and the value at 0 of the line that fits best, which is flat with one point."""
    if len(points) < 2:
        return 0.0, next(iter(points.values()))
    slope, base = np.polyfit(list(points), list(points.values()), 1)
    return float(slope), float(base)


def memory_fit(
    points: Mapping[str, Mapping[int, float]], limit: float, path: Path, *, x: str, form: AxisFormat = plain_axis
) -> Path:
    """Draw memory over batch size, with the straight line through it to where it would meet the limit.

    Return the path.
    """
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    end = float(max(max(series) for series in points.values()))
    for name, own_style in series_styles(points).items():
        xs = sorted(points[name])
        ys = [points[name][at] for at in xs]
        axis.plot(xs, ys, color=own_style.colour, marker=own_style.marker, linestyle="none", label=name)
        if len(xs) > 1:
            slope, base = straight_line(points[name])
            meets = (limit - base) / slope if slope > 0 else math.inf
            end = max(end, min(meets, 8 * max(xs)))
            reach = np.array([0, min(meets, 8 * max(xs))])
            axis.plot(reach, base + slope * reach, color=own_style.colour, linewidth=1, linestyle="--")
    axis.axhline(limit, color="#333333", linewidth=1.4, linestyle="-.")
    axis.annotate(
        "memory that a rank has here", (0, limit), xytext=(4, -12), textcoords="offset points", color="#333333"
    )
    axis.set(title="Memory of the process, and where it would end", xlabel=x, xlim=(0, end * 1.05))
    axis.set_ylim(0, limit * 1.08)
    form(axis)
    axis.legend(loc="lower right")
    return save(figure, path)
