"""Reads what is to change about a run's devices and links.

What is asked may come from a browser: every text is bounded and checked, and errors name the parameter.

- `add`: a device like one that is there, or with a stated speed: `like:2`, `like:2,memory=1GiB,rate=50Mbit`, or
  `speed=0.5,memory=1GiB,rate=100Mbit,latency=2ms`, where the speed is relative to the device in `like`, else to rank 0.
- `remove`: a rank, by its number or by its device's name.
- `rates`: the rate of a link between two ranks (`0-1`), of all links of one (`2`), or of all (`all`): `100Mbit`, or
  with a latency `100Mbit,5ms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from horizonml.errors import JobError
from horizonml.planner.changes import Added, Changes, NewRate
from horizonml.planner.devices import Bytes, Rate, Seconds
from horizonml.planner.objective import Watts
from horizonml.planner.record import Planning
from horizonml.text import nearest, printable

MOST_RANKS = 64  # after the change, so that planning takes seconds
_MOST_CHANGES = 64  # of each kind
_MOST_TEXT = 200  # characters of one change
_SPEEDS = (1e-3, 1e3)  # relative
_MEMORIES = (1 << 20, 1 << 50)  # bytes
_RATES = (125.0, 1.25e11)  # bytes per second: 1 kbit/s to 1 Tbit/s
_LATENCIES = (0.0, 10.0)  # seconds
_FIELDS = ("like", "speed", "memory", "rate", "latency", "watts", "name")


def read_changes(
    planning: Planning, add: Sequence[str], remove: Sequence[str | int], rates: Mapping[str, str]
) -> Changes:
    """Return the changes that texts ask for. Raises JobError, which names the parameter."""
    for name, given in (("add", add), ("remove", remove), ("rate", rates)):
        if len(given) > _MOST_CHANGES:
            raise JobError(f"{name}: {len(given)} changes at once are too many; ask for at most {_MOST_CHANGES}")
    removed = tuple(dict.fromkeys(_rank(planning, "remove", str(one)) for one in remove))
    added = tuple(_added(planning, text) for text in add)
    ranks = len(planning.devices) - len(removed) + len(added)
    if ranks < 1:
        raise JobError("remove: no device would be left; leave one, or add another")
    if ranks > MOST_RANKS and (add or remove):
        raise JobError(f"add: {ranks} devices are more than can be planned for here ({MOST_RANKS})")
    return Changes(added, removed, tuple(_rate(planning, link, text) for link, text in rates.items()))


def _added(planning: Planning, text: str) -> Added:
    """Read a device that is to be added."""
    _short("add", text)
    values: dict[str, str] = {}
    for item in text.split(","):
        name, sign, value = item.replace("=", ":", 1).partition(":")
        name, value = name.strip(), value.strip()
        if not sign or not value or name not in _FIELDS:
            raise JobError(
                f"add: {_shown(item)} is none of {', '.join(_FIELDS)}{nearest(name, _FIELDS)}; write for example "
                "like:0 or speed=0.5,memory=1GiB,rate=100Mbit"
            )
        if name in values:
            raise JobError(f"add: {name} is given twice in {_shown(text)}")
        values[name] = value
    like = _rank(planning, "add: like", values["like"]) if "like" in values else None
    if like is None and not {"memory", "speed"} <= values.keys():
        raise JobError(f"add: {_shown(text)} names neither the device that it is like, nor its speed and memory")
    name = values.get("name", "")
    if not name.isprintable() or len(name) > 40:
        raise JobError("add: name must be at most 40 printable characters")
    return Added(
        like,
        _measure("add: speed", float, values.get("speed"), _SPEEDS, "0.001 to 1000") or 1.0,
        _measure("add: memory", Bytes, values.get("memory"), _MEMORIES, "1MiB to 1PiB"),
        _measure("add: rate", Rate, values.get("rate"), _RATES, "1kbit to 1000Gbit"),
        _measure("add: latency", Seconds, values.get("latency"), _LATENCIES, "0s to 10s"),
        _watts(values.get("watts")),
        name,
    )


def _watts(text: str | None) -> Watts | None:
    """Return the watts of `2.5/6`, what a device draws while it waits and while it works."""
    if text is None:
        return None
    try:
        return Watts.from_json([float(part) for part in text.split("/")])
    except ValueError:
        raise JobError(f"add: watts: {_shown(text)} is not IDLE/BUSY in watts, such as 2.5/6") from None


def _rate(planning: Planning, link: str, text: str) -> NewRate:
    """Read the new rate of a link, or of all links of a device."""
    _short("rate", link)
    _short("rate", text)
    rate, _, latency = text.partition(",")
    bandwidth = _measure(f"rate: {_shown(link)}", Rate, rate, _RATES, "1kbit to 1000Gbit")
    assert bandwidth is not None
    after = _measure(f"rate: latency of {_shown(link)}", Seconds, latency or None, _LATENCIES, "0s to 10s")
    if link.strip() == "all":
        return NewRate((), bandwidth, after)
    if link.strip() in planning.names:  # a name may have a dash in it
        return NewRate((planning.names.index(link.strip()),), bandwidth, after)
    ends = link.split("-")
    if len(ends) > 2:
        ends = _two_names(planning, link)
    ranks = tuple(_rank(planning, "rate", end) for end in ends)
    if len(set(ranks)) != len(ranks):
        raise JobError(f"rate: {_shown(link)} is not a link, for both ends are the same rank")
    return NewRate(ranks, bandwidth, after)


def _two_names(planning: Planning, link: str) -> list[str]:
    """Return the two ends of a link whose names may have dashes in them."""
    parts = link.split("-")
    for cut in range(1, len(parts)):
        one, other = "-".join(parts[:cut]), "-".join(parts[cut:])
        if _known(planning, one) is not None and _known(planning, other) is not None:
            return [one, other]
    return [link]


def _known(planning: Planning, text: str) -> int | None:
    """Return the rank with this number or name, or None."""
    text = text.strip()
    number = text.removeprefix("rank").strip()
    if number.isascii() and number.isdecimal() and len(number) < 6 and int(number) < len(planning.devices):
        return int(number)
    return planning.names.index(text) if text in planning.names else None


def _rank(planning: Planning, parameter: str, text: str) -> int:
    _short(parameter, text)
    found = _known(planning, text)
    if found is None:
        there = ", ".join(f"{rank} ({name})" for rank, name in list(enumerate(planning.names))[:8])
        more = ", ..." if len(planning.names) > 8 else ""
        raise JobError(f"{parameter}: {_shown(text)} is not a device of this run; there are {there}{more}")
    return found


def _measure(parameter: str, kind: Any, text: str | None, bounds: tuple[float, float], words: str) -> float | None:
    """Return a number with its unit that lies within bounds, which `words` name; None for None."""
    if text is None:
        return None
    try:
        value = TypeAdapter(kind).validate_python(text.strip())
    except ValidationError as error:
        problem = printable(error.errors()[0]["msg"].removeprefix("Value error, "), _MOST_TEXT)
        raise JobError(f"{parameter}: {problem}") from None
    low, high = bounds
    if not low <= value <= high:  # which no NaN is
        raise JobError(f"{parameter}: {_shown(text)} is not from {words}")
    return float(value)


def _short(parameter: str, text: object) -> None:
    if not isinstance(text, str) or len(text) > _MOST_TEXT:
        raise JobError(f"{parameter}: a text of at most {_MOST_TEXT} characters is needed")


def _shown(text: str) -> str:
    """Return a text from elsewhere as it may stand in a message."""
    plain = ascii(text)
    return plain if len(plain) <= 60 else f"{plain[:60]} ..."
