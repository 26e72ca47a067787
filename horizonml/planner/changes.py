"""Reads what is to change about a run's devices and links, and describes the devices and links after the change.

What is asked may come from a browser: every text is bounded and checked, and errors name the parameter.

- `add`: a device like one that is there, or with a stated speed: `like:2`, `like:2,memory=1GiB,rate=50Mbit`, or
  `speed=0.5,memory=1GiB,rate=100Mbit,latency=2ms`, where the speed is relative to the device in `like`, else to rank 0.
- `remove`: a rank, by its number or by its device's name.
- `rates`: the rate of a link between two ranks (`0-1`), of all links of one (`2`), or of all (`all`): `100Mbit`, or
  with a latency `100Mbit,5ms`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from horizonml.errors import JobError
from horizonml.planner.devices import Bytes, Rate, Seconds
from horizonml.planner.problem import Problem, Watts
from horizonml.planner.profile import Host, MeasuredLink, Network
from horizonml.planner.record import Planning
from horizonml.planner.search import among
from horizonml.text import nearest, printable, shown


@dataclass(frozen=True)
class Added:
    """Describes a device that is added; what is None is as with the device that it is like."""

    like: int | None = None  # a rank of the present plan
    speed: float = 1.0  # relative to that rank's device, or else to rank 0's
    memory: float | None = None
    rate: float | None = None  # of all its links, in bytes per second
    latency: float | None = None
    watts: Watts | None = None
    name: str = ""


@dataclass(frozen=True)
class NewRate:
    """Describes how fast links become: those between `ranks`, all of one rank, or all of them if there is none."""

    ranks: tuple[int, ...]
    bandwidth: float  # bytes per second
    latency: float | None = None


@dataclass(frozen=True)
class Changes:
    """Holds what is to change; ranks are those of the present plan."""

    add: tuple[Added, ...] = ()
    remove: tuple[int, ...] = ()
    rates: tuple[NewRate, ...] = ()


@dataclass(frozen=True)
class Changed:
    """Holds the devices and links after the change."""

    problem: Problem
    names: tuple[str, ...]  # of the ranks' devices
    origins: tuple[int | None, ...]  # the rank that each was in the present plan; None if it is added


def apply_changes(planning: Planning, problem: Problem, changes: Changes) -> Changed:
    """Return the devices and links after the change. Raises JobError if nobody knows how fast a new link would be.

    Links change first, then devices go, then others come.
    """
    network = problem.network
    for rate in changes.rates:
        network = _with_rate(network, problem.ranks, rate)
    kept = [rank for rank in range(problem.ranks) if rank not in changes.remove]
    names = [planning.names[rank] for rank in kept]
    problem = replace(problem, network=network)
    if not changes.add and not changes.remove:
        return Changed(problem, tuple(names), tuple(kept))
    left = among(problem, kept)
    profiles, hosts, watts = list(left.profiles), list(left.hosts), list(left.watts) or [None] * len(kept)
    present, network = network, left.network
    for added in changes.add:
        model = added.like if added.like is not None else 0
        rank = len(profiles)
        network = _with_device(network, present, problem.ranks, added, kept, rank)
        profile = problem.profiles[model]
        profiles.append(profile if added.speed == 1 else profile.scaled(1 / added.speed))
        usual_watts = problem.watts[model] if added.like is not None and problem.watts else None
        watts.append(added.watts or usual_watts)
        host = next(host for host in problem.hosts if model in host.ranks)
        memory = host.memory if added.memory is None else added.memory
        hosts.append(Host((rank,), host.cores, memory, bursts=host.bursts))
        usual = f"{planning.devices[model].name}-new" if added.like is not None else "new"
        names.append(_unused(added.name or usual, names))
    origins = (*kept, *[None] * len(changes.add))
    after = replace(problem, profiles=profiles, hosts=hosts, network=network, watts=watts)
    return Changed(after, tuple(names), origins)


def _with_rate(network: Network, ranks: int, rate: NewRate) -> Network:
    """Return the links after one change.

    The rate of a device is that of its own connection: a link to a device with a slower one is as fast as that one.
    """
    pairs = dict(network.pairs)
    for a in range(ranks):
        for b in range(ranks):
            if a == b or (len(rate.ranks) == 2 and {a, b} != set(rate.ranks)):
                continue
            bandwidth = rate.bandwidth
            if len(rate.ranks) == 1:
                (device,) = rate.ranks
                if device not in (a, b):
                    continue
                bandwidth = min(bandwidth, _best(network, a + b - device, [r for r in range(ranks) if r != device]))
            latency = network.between(a, b).latency if rate.latency is None else rate.latency
            pairs[a, b] = latency, bandwidth
    return replace(network, pairs=pairs)


def _best(network: Network, rank: int, others: Sequence[int]) -> float:
    """Return the bandwidth of a rank's fastest link to one of the others; it has no limit if there is none."""
    ways = ((rank, other) for other in others if other != rank)
    rates = [network.between(a, b).bandwidth for pair in ways for a, b in (pair, pair[::-1])]
    return max(rates, default=float("inf"))


def _with_device(
    network: Network, present: Network, ranks: int, added: Added, kept: Sequence[int], rank: int
) -> Network:
    """Return the links with those of a new `rank`; `present` are those among all the `ranks` before the change."""
    pairs = dict(network.pairs)
    before = list(range(rank))  # ranks after the change
    own = [other for other in range(ranks) if other != added.like]
    for other in before:
        origin = kept[other] if other < len(kept) else None  # another new device has no present rank
        for pair, way in (((rank, other), 0), ((other, rank), 1)):
            link = _like(present, added.like, origin, own, way)
            bandwidth = added.rate
            if bandwidth is not None:
                bandwidth = min(bandwidth, _best(network, other, before))
            elif link is not None:
                bandwidth = link.bandwidth
            if bandwidth is None:
                raise JobError("add: nothing is known of the new device's link; say its rate, such as rate=100Mbit")
            latency = added.latency if added.latency is not None else link.latency if link is not None else None
            if latency is None:
                latency = _usual_latency(network, before)
            pairs[pair] = latency, bandwidth
    access = (*network.access, network.bandwidth) if network.access else ()
    return replace(network, pairs=pairs, access=access)


def _like(present: Network, like: int | None, origin: int | None, own: Sequence[int], way: int) -> MeasuredLink | None:
    """Return the link that a new device has to a rank if it is connected like the rank `like`, or None.

    To the device that it is like, and to other new devices, it has the slowest of that device's links.
    """
    if like is None:
        return None
    if origin is not None and origin != like:
        return present.between(*((like, origin) if way == 0 else (origin, like)))
    links = [present.between(*((like, other) if way == 0 else (other, like))) for other in own]
    if not links:
        return None
    return MeasuredLink(max(link.latency for link in links), min(link.bandwidth for link in links))


def _usual_latency(network: Network, ranks: Sequence[int]) -> float:
    """Return the median of the links' latencies."""
    found = [network.between(a, b).latency for a in ranks for b in ranks if a != b]
    return statistics.median(found) if found else network.latency


def _unused(name: str, names: Sequence[str]) -> str:
    number = 2
    found = name
    while found in names:
        found, number = f"{name}-{number}", number + 1
    return found


MOST_RANKS = 64  # after the change, so that planning takes seconds
_MOST_CHANGES = 64  # of each kind
_MOST_TEXT = 200  # characters of one change
# What is measured: its kind, its bounds (in bytes, bytes per second or seconds), and the bounds in words.
_MEASURES: dict[str, tuple[Any, float, float, str]] = {
    "speed": (float, 1e-3, 1e3, "0.001 to 1000"),  # relative
    "memory": (Bytes, 1 << 20, 1 << 50, "1MiB to 1PiB"),
    "rate": (Rate, 125.0, 1.25e11, "1kbit to 1000Gbit"),
    "latency": (Seconds, 0.0, 10.0, "0s to 10s"),
}
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
                f"add: {shown(item)} is none of {', '.join(_FIELDS)}; write for example like:0 or "
                f"speed=0.5,memory=1GiB,rate=100Mbit{nearest(name, _FIELDS)}"
            )
        if name in values:
            raise JobError(f"add: {name} is given twice in {shown(text)}")
        values[name] = value
    like = _rank(planning, "add: like", values["like"]) if "like" in values else None
    if like is None and not {"memory", "speed"} <= values.keys():
        raise JobError(f"add: {shown(text)} names neither the device that it is like, nor its speed and memory")
    name = values.get("name", "")
    if not name.isprintable() or len(name) > 40:
        raise JobError("add: name must be at most 40 printable characters")
    speed, memory, rate, latency = (_measure(f"add: {one}", one, values.get(one)) for one in _MEASURES)
    return Added(
        like,
        speed or 1.0,
        memory,
        rate,
        latency,
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
        raise JobError(f"add: watts: {shown(text)} is not IDLE/BUSY in watts, such as 2.5/6") from None


def _rate(planning: Planning, link: str, text: str) -> NewRate:
    """Read the new rate of a link, or of all links of a device."""
    _short("rate", link)
    _short("rate", text)
    rate, _, latency = text.partition(",")
    bandwidth = _measure(f"rate: {shown(link)}", "rate", rate)
    assert bandwidth is not None
    after = _measure(f"rate: latency of {shown(link)}", "latency", latency or None)
    if link.strip() == "all":
        return NewRate((), bandwidth, after)
    if link.strip() in planning.names:  # a name may have a dash in it
        return NewRate((planning.names.index(link.strip()),), bandwidth, after)
    ends = link.split("-")
    if len(ends) > 2:
        ends = _two_names(planning, link)
    ranks = tuple(_rank(planning, "rate", end) for end in ends)
    if len(set(ranks)) != len(ranks):
        raise JobError(f"rate: {shown(link)} is not a link, for both ends are the same rank")
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
        raise JobError(f"{parameter}: {shown(text)} is not a device of this run; there are {there}{more}")
    return found


def _measure(parameter: str, name: str, text: str | None) -> float | None:
    """Return a number with its unit that lies within the bounds of what it measures; None for None."""
    if text is None:
        return None
    kind, low, high, words = _MEASURES[name]
    try:
        value = TypeAdapter(kind).validate_python(text.strip())
    except ValidationError as error:
        problem = printable(error.errors()[0]["msg"].removeprefix("Value error, "), _MOST_TEXT)
        raise JobError(f"{parameter}: {problem}") from None
    if not low <= value <= high:  # which no NaN is
        raise JobError(f"{parameter}: {shown(text)} is not from {words}")
    return float(value)


def _short(parameter: str, text: object) -> None:
    if not isinstance(text, str) or len(text) > _MOST_TEXT:
        raise JobError(f"{parameter}: a text of at most {_MOST_TEXT} characters is needed")
