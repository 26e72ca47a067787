"""Shows runs in notebooks: a bar while a run trains, and its losses as a picture."""

from __future__ import annotations

import html
import math
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from horizonml.report.live import LiveRun
from horizonml.telemetry.record import judged
from horizonml.text import human_seconds

_SECONDS = 0.5  # between two looks at the records
_WIDTH, _HEIGHT, _POINTS = 480, 160, 240  # of a picture, in pixels, and of a curve


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class NotebookBar:
    """Shows below a notebook's cell how far the run in a folder has come."""

    def __init__(self, folder: Path) -> None:
        self._run, self._until = LiveRun(folder), 0.0
        self._ipython = import_module("IPython.display")
        self._shown = self._ipython.display(self._ipython.HTML(""), display_id=True)

    def update(self, last: bool = False) -> None:
        """Show what was recorded since the last call, but not too often, unless this is the `last` call."""
        if (last or time.monotonic() > self._until) and self._run.poll():
            self._until = time.monotonic() + _SECONDS
            self._shown.update(self._ipython.HTML(bar(self._run)))


def bar(run: LiveRun) -> str:
    """Return a bar (HTML) for the steps of a run, with its newest figures in words."""
    step, total = run.step, run.total_steps or run.step or 1
    words = [f"step {step:,} of {total:,}"]
    if run.newest is not None:
        words += [f"epoch {run.newest.epoch} of {run.total_epochs}", judged(run.newest.loss, run.newest.metrics)]
    if run.evaluations:
        words.append("held-out " + judged(run.evaluations[-1].loss, run.evaluations[-1].metrics))
    if run.speed is not None:
        words.append("{:,.0f} {}/s".format(*run.speed))
    words.append(f"{human_seconds(run.seconds_left)} left" if run.seconds_left else str(run.state))
    return f'<progress value="{step}" max="{total}"></progress> {html.escape(" | ".join(words))}'


def picture(curves: Sequence[tuple[str, str, Sequence[tuple[int, float]]]]) -> str:
    """Return a picture (SVG) of losses over steps, on a logarithmic scale; each curve has a name and a colour."""
    known = {name: [(step, math.log10(loss)) for step, loss in points if loss > 0] for name, _, points in curves}
    values = [value for points in known.values() for _, value in points if math.isfinite(value)]
    if not values:
        return ""
    low, high, last = min(values), max(values), max(step for points in known.values() for step, _ in points)
    drawn = []
    for place, (name, colour, _) in enumerate(curves):
        points = known[name][:: -(-len(known[name]) // _POINTS) or 1]
        where = " ".join(
            f"{step / last * _WIDTH:.1f},{(high - value) / max(high - low, 1e-9) * _HEIGHT:.1f}"
            for step, value in points
            if math.isfinite(value)
        )
        drawn.append(f'<polyline fill="none" stroke="{colour}" points="{where}"/>')
        drawn.append(f'<text x="{_WIDTH}" y="{14 * (place + 1)}" text-anchor="end" fill="{colour}">{name}</text>')
    scale = f"loss from {10**high:.3g} to {10**low:.3g} (logarithmic) over {last:,} steps"
    size = f'width="{_WIDTH}" height="{_HEIGHT + 2}" viewBox="0 -1 {_WIDTH} {_HEIGHT + 2}"'
    return f'<svg {size} font-size="12" role="img" aria-label="{scale}">{"".join(drawn)}</svg><p>{scale}</p>'
