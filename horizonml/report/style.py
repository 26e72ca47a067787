"""Makes all pictures look alike: readable in print, and by the colour-blind.

Colours are those of Okabe and Ito, "Color Universal Design" (2008); markers and hatches repeat what they say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, MultipleLocator

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


class _BinaryLocator(MaxNLocator):
    """Places ticks at round numbers of KiB, MiB or GiB."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        unit = next((2.0**power for power in (30, 20, 10) if vmax >= 2 * 2.0**power), 1.0)
        return [tick * unit for tick in super().tick_values(vmin / unit, vmax / unit)]


def bytes_axis(axis: Axes) -> None:
    """Label the y axis in KiB, MiB, ..."""
    axis.yaxis.set_major_locator(_BinaryLocator(7))
    axis.yaxis.set_major_formatter(lambda value, _: _bytes(value))


def byte_rate_axis(axis: Axes) -> None:
    """Label the y axis in KiB/s, MiB/s, ..."""
    axis.yaxis.set_major_locator(_BinaryLocator(7))
    axis.yaxis.set_major_formatter(lambda value, _: f"{_bytes(value)}/s")


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


def seconds_axis(axis: Axes) -> None:
    """Label the y axis in ms, s, min."""
    axis.yaxis.set_major_formatter(lambda value, _: human_seconds(value).replace(".0 ", " "))


def share_axis(axis: Axes) -> None:
    """Label the y axis in percent, as tables do."""
    axis.yaxis.set_major_formatter(lambda value, _: percent(value))


def percent_axis(axis: Axes) -> None:
    """Label the y axis in percent, with three digits that count."""
    axis.yaxis.set_major_formatter(lambda value, _: f"{_short(100 * value)}%")


def plain_axis(axis: Axes) -> None:
    """Label the y axis with thousands separated."""
    axis.yaxis.set_major_formatter(lambda value, _: _short(value))


_CLOCK_TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)  # seconds


def clock_axis(axis: Axes, end: float) -> None:
    """Label the x axis, which begins at 0 and ends at `end` seconds, in minutes and seconds."""
    axis.set_xlim(0, end)
    tick = next((tick for tick in _CLOCK_TICKS if end / tick <= 12), _CLOCK_TICKS[-1])
    axis.xaxis.set_major_locator(MultipleLocator(tick))
    axis.xaxis.set_major_formatter(lambda value, _: "{}:{:02}".format(*divmod(round(value), 60)))


AxisFormat = Callable[[Axes], None]


def save(figure: Figure, path: Path) -> Path:
    """Write a picture. Raises JobError."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return path
