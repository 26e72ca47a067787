"""Lays out how a run stands as the lines of a terminal, for `horizonml watch --terminal`: as many as there is room for.

The lines are made from what `live.LiveRun` has read, without a terminal. Nothing that a rank has sent reaches the
terminal with control characters in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from horizonml.engine.clock import KINDS
from horizonml.planner.record import Planning
from horizonml.report.live import LiveRun
from horizonml.report.live_facts import LiveRank, RunState
from horizonml.telemetry.record import metric_text
from horizonml.telemetry.run_info import StageFacts
from horizonml.text import human_bytes, human_seconds, printable

_COLOURS = {"compute": "green", "transfer": "yellow", "wait": "bright_black"}
_STATES = {
    RunState.WAITING: "yellow",
    RunState.RUNNING: "green",
    RunState.FINISHED: "blue",
    RunState.STOPPED: "yellow",
    RunState.FAILED: "red",
    RunState.LOST: "red",
}
_DIRECTIONS = {"previous": "stage before", "next": "stage after", "members": "same stage"}
_LEAST_WIDTH = 40


@dataclass(frozen=True)
class ScreenCharacters:
    """The characters that bars and curves are drawn with."""

    bar: tuple[str, str, str]  # compute, transfer, wait
    levels: str  # of a curve, from low to high
    cut: str  # ends a text that has no room
    dot: str  # separates


UNICODE = ScreenCharacters(("█", "▓", "░"), "▁▂▃▄▅▆▇█", "…", " · ")
ASCII = ScreenCharacters(("#", "=", "."), "_.-=*#", "~", " | ")


@dataclass(frozen=True)
class ScreenSection:
    """Some lines below a heading; where there is no room for all, the last ones are left out."""

    heading: str
    lines: Sequence[Text]
    least: int  # lines that should be shown, as far as there are any
    newest_last: bool = False  # whether the first lines are left out instead


def frame(run: LiveRun, width: int = 80, height: int | None = None, chars: ScreenCharacters = UNICODE) -> list[Text]:
    """Return how a run stands, as lines of at most `width` columns; at most `height` of them, if that is given."""
    width = max(_LEAST_WIDTH, width)
    head = _head(run, width, chars)
    members = run.members
    sections = [
        ScreenSection(_ranks_heading(chars), [_rank(one, width, chars) for one in members], 4),
        ScreenSection("plan", [_stage(n, stage, run, width) for n, stage in enumerate(run.plan.stages)], 3),
        ScreenSection("links", _links(members, run.planning), 2),
        ScreenSection("events", [_event(one.time, one.text) for one in run.events], 2, newest_last=True),
    ]
    sections = [section for section in sections if section.lines]
    room = None if height is None else height - len(head)
    lines = [*head, *_fitted(sections, room, chars)]
    for line in lines:
        line.no_wrap = True
        _cut(line, width, chars)
    return lines if height is None else lines[:height]


def _fitted(sections: Sequence[ScreenSection], room: int | None, chars: ScreenCharacters) -> list[Text]:
    """Return the lines of the sections that have room, each section with its heading and as many as it should show."""
    wanted = [len(section.lines) for section in sections]
    if room is not None:
        given = [min(section.least, number) for section, number in zip(sections, wanted, strict=True)]
        while sections and sum(given) + 2 * len(given) > room:  # a blank line and a heading each
            most = max(range(len(given)), key=lambda place: (given[place], place))
            if given[most] > 1:
                given[most] -= 1
            else:
                sections, given, wanted = sections[:-1], given[:-1], wanted[:-1]
        while sum(given) + 2 * len(given) < room and given != wanted:
            place = min(
                (place for place in range(len(given)) if given[place] < wanted[place]), key=lambda one: given[one]
            )
            given[place] += 1
        wanted = given
    lines = []
    for section, number in zip(sections, wanted, strict=True):
        left_out = len(section.lines) - number
        heading = section.heading + (f"  ({left_out} more)" if left_out else "")
        shown = section.lines[left_out:] if section.newest_last else section.lines[:number]
        lines += [Text(""), Text(heading, style="bold"), *(line.copy() for line in shown)]
    return lines


def _head(run: LiveRun, width: int, chars: ScreenCharacters) -> list[Text]:
    """Return what the run is, how far it is, and how well it does."""
    state, step, total, epochs = run.state, run.newest, run.total_steps, run.total_epochs
    title = Text(_short(run.name, max(12, width - 66), chars), style="bold")
    title.append(chars.dot)
    title.append(state.value, style=_STATES[state])
    title.append(f"{chars.dot}step {run.step:,}{f' of {total:,}' if total else ''}")
    if step is not None:
        title.append(f"{chars.dot}epoch {step.epoch}{f' of {epochs}' if epochs else ''}")
    if run.seconds_left is not None:
        title.append(f"{chars.dot}{_clock(run.seconds_left)} left")
    lines = [title]
    if step is None:
        return [*lines, Text("no step is done yet", style="dim")]
    words = [f"loss {step.loss:.4f}"]
    if run.accuracy is not None:
        words.append(f"accuracy {metric_text('accuracy', run.accuracy)}")
    if run.speed is not None:
        words.append(f"{run.speed[0]:,.0f} {run.speed[1]}/s")
    if run.step_seconds is not None:
        planned = f" (predicted {human_seconds(run.forecast)})" if run.forecast else ""
        words.append(f"{human_seconds(run.step_seconds)} a step{planned}")
    lines.append(Text(chars.dot.join(words)))
    losses = [math.nan if point[1] is None else point[1] for point in run.curve.since()]
    curve = sparkline(losses, min(60, width - 22), chars.levels)
    if curve:
        ends = f" {losses[0]:.3g} to {losses[-1]:.3g}"
        lines.append(Text.assemble("loss ", (curve, "cyan"), ends))
    if run.damaged:
        lines.append(Text(f"{run.damaged} damaged lines of the records were skipped", style="yellow"))
    return lines


def sparkline(values: Sequence[float], width: int, levels: str = UNICODE.levels) -> str:
    """Return a curve of at most `width` characters; each stands for the mean of some values, and `?` for none."""
    if not values or width < 1:
        return ""
    cells = min(width, len(values))
    parts = [values[len(values) * n // cells : len(values) * (n + 1) // cells] for n in range(cells)]
    means = [sum(part) / len(part) for part in parts]
    finite = [mean for mean in means if abs(mean) < float("inf")]  # which no NaN is
    if not finite:
        return "?" * cells
    low, high = min(finite), max(finite)
    scale = (len(levels) - 1) / (high - low) if 0 < high - low < math.inf else 0.0
    return "".join(levels[round((mean - low) * scale)] if abs(mean) < float("inf") else "?" for mean in means)


def _ranks_heading(chars: ScreenCharacters) -> str:
    return "ranks   " + "  ".join(f"{sign} {kind}" for sign, kind in zip(chars.bar, KINDS, strict=True))


def _rank(member: LiveRank, width: int, chars: ScreenCharacters) -> Text:
    """Return a line about one rank: its machine, where its time goes, and what it takes."""
    room = 12 if width < 100 else 24
    stages = ",".join(map(str, member.stages)) or "-"
    text = Text(f"{member.rank:>3} {_fit(member.host, room, chars)} stage {stages:<3} ")
    if not member.split:
        text.append("no step yet" if member.started_as is not None else "records elsewhere", style="dim")
        return text
    size = max(10, min(40, width - room - 54))
    filled = 0
    done = 0.0
    for kind, sign in zip(KINDS, chars.bar, strict=True):
        done += member.split[kind]
        end = max(filled, min(size, round(size * done)))
        text.append(sign * (end - filled), style=_COLOURS[kind])
        filled = end
    shares = "/".join(f"{100 * member.split[kind]:.0f}" for kind in KINDS)
    text.append(" " * (size - filled) + f" {shares:>9}%")
    if member.rss_bytes is not None:
        text.append(f" {human_bytes(member.rss_bytes):>9}")
    if member.cores_used is not None:
        text.append(f" {member.cores_used:4.1f} cores")
    if member.slowdown is not None and member.slowdown >= 1.3:
        text.append(f" {member.slowdown:.1f}x slower", style="red")
    if width >= 140 and member.processor:
        text.append(f"  {member.processor}", style="dim")
    return text


def _stage(number: int, stage: StageFacts, run: LiveRun, width: int) -> Text:
    names, last = run.layers, stage.stop - 1
    layers = f"layer {stage.start}" if last <= stage.start else f"layers {stage.start}-{last}"
    if 0 <= stage.start <= last < len(names) and width >= 60:
        layers += f" ({names[stage.start]}{f' .. {names[last]}' if last > stage.start else ''})"
    shares = getattr(stage, "shares", None)
    who = [str(rank) for rank in stage.ranks]
    if isinstance(shares, list) and len(shares) == len(who) > 1 and all(isinstance(s, int | float) for s in shares):
        total = sum(shares)
        if total > 0:
            who = [f"{rank} ({share / total:.0%})" for rank, share in zip(who, shares, strict=True)]
    text = f"stage {number}: rank{'s' * (len(who) > 1)} {', '.join(who)}: {layers}"
    send = getattr(stage, "send", "fp32")
    if isinstance(send, str) and send != "fp32" and number + 1 < len(run.plan.stages):
        text += f", sends {printable(send, 20)}"
    return Text(text)


def _links(members: Sequence[LiveRank], planning: Planning | None) -> list[Text]:
    """Return what each rank sends and receives, and how fast the links are, as far as they were measured."""
    lines = []
    for member in members:
        flows = [
            f"{_DIRECTIONS.get(way, way)} {_rate(member.sent[way])} out, {_rate(member.received.get(way, 0.0))} in"
            for way in member.sent
            if member.sent[way] or member.received.get(way)
        ]
        if flows:
            lines.append(Text(f"{member.rank:>3}  {'; '.join(flows)}"))
    if planning is not None and planning.problem is not None and len(planning.devices) > 1:
        ranks = range(len(planning.devices))
        found = [(planning.problem.network.between(a, b), a, b) for a in ranks for b in ranks if a != b]
        slow, one, other = min(found, key=lambda link: link[0].bandwidth)
        fast = max(link.bandwidth for link, _, _ in found)
        lines.append(
            Text(
                f"     measured: {_rate(fast)} at most; the slowest, {one} to {other}: {_rate(slow.bandwidth)}, "
                f"{human_seconds(slow.latency)}",
                style="dim",
            )
        )
    return lines


def _event(when: float, text: str) -> Text:
    try:
        moment = time.strftime("%H:%M:%S", time.localtime(when))
    except (OverflowError, ValueError, OSError):  # a damaged time
        moment = "--:--:--"
    return Text(f"{moment}  {printable(text, 200)}")


def _fit(text: str, width: int, chars: ScreenCharacters) -> str:
    return (
        text + " " * (width - cell_len(text)) if cell_len(text) <= width else set_cell_size(text, width - 1) + chars.cut
    )


def _short(text: str, width: int, chars: ScreenCharacters) -> str:
    return text if cell_len(text) <= width else _fit(text, width, chars)


def _cut(line: Text, width: int, chars: ScreenCharacters) -> None:
    if cell_len(line.plain) > width:
        line.truncate(width - 1)
        line.append(chars.cut)


def _rate(bytes_per_second: float) -> str:
    """Return a rate as networks are rated: in bits."""
    bits = 8 * bytes_per_second
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if bits < 1000:
            return f"{bits:.3g} {unit}"
        bits /= 1000
    return f"{bits:,.3g} Gbit/s" if bits < 1000 else f"{bits:,.0f} Gbit/s"


def _clock(seconds: float) -> str:
    """Return a time as 1:23:45, or 2:05."""
    minutes, rest = divmod(round(min(seconds, 1e8)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
