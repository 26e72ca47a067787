"""Writes down what a run is planned for, so that it can be planned again on paper; and reads it back, with suspicion.

The file `planning.json` in a run's folder holds the newest plan with everything that it was made of: the devices, the
measured links, the profiles and the job. Of the plans before it, it holds a line each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from horizonml.errors import HorizonError, PlanError
from horizonml.files import write_atomically
from horizonml.job.schema import Job
from horizonml.plan.lossy import Tried
from horizonml.plan.plan import Plan, Sync
from horizonml.planner.devices import check_profile
from horizonml.planner.objective import Watts
from horizonml.planner.problem import Loading, Problem
from horizonml.planner.profile import Contention, Host, Network, Profile
from horizonml.planner.strategies import constraints_of, objective_of
from horizonml.text import printable

FILE = "planning.json"
_FORMAT = 1
_MOST_BYTES = 64 << 20
_MOST_EARLIER = 100
_MOST_RANKS = 4096
_MOST_NAME = 64  # characters
_MOST_REASON = 1000  # characters
_MOST_REASONS = 2 * _MOST_RANKS


@dataclass(frozen=True)
class DeviceFacts:
    """Says which machine a rank is on."""

    name: str
    processor: str = ""
    architecture: str = ""
    node: str = ""  # identifies the machine


@dataclass(frozen=True)
class Earlier:
    """Tells of a plan that another one has replaced."""

    step: int  # steps that were done when training by it began
    time: float
    ranks: int
    seconds: float | None  # that a step was predicted to take
    plan: Plan


@dataclass(frozen=True)
class Planning:
    """Holds a run's plan and what it was made of.

    Where the job's strategy leaves nothing to choose, nothing is `measured`: then `problem` and `seconds` rest on a
    profile that rank 0's device had from before, and on no links at all, or are None.
    """

    job: Job
    layers: tuple[str, ...]  # their names
    devices: tuple[DeviceFacts, ...]  # of the ranks
    hosts: tuple[Host, ...]
    plan: Plan
    step: int  # steps that were done when training by this plan began
    time: float  # Unix time
    started_as: tuple[int, ...]  # the rank that each rank was started as
    problem: Problem | None = None
    seconds: float | None = None  # that a step is predicted to take
    measured: bool = False  # whether the devices and links of the problem were measured
    reasons: tuple[str, ...] = ()  # a sentence for each choice of the plan
    tried: Tried | None = None  # what a trial of lossy formats has found
    earlier: tuple[Earlier, ...] = ()

    @property
    def names(self) -> list[str]:
        """Return a name for every rank's device that no other has."""
        given = [device.name for device in self.devices]
        return [name if given.count(name) == 1 else f"{name}-rank{rank}" for rank, name in enumerate(given)]

    def to_json(self) -> dict[str, Any]:
        """Return the planning as a JSON object."""
        return {
            "format": _FORMAT,
            "step": self.step,
            "time": self.time,
            "started_as": list(self.started_as),
            "plan": self.plan.to_json(),
            "seconds": self.seconds,
            "measured": self.measured,
            "reasons": list(self.reasons),
            "tried": self.tried.to_json() if self.tried is not None else None,
            "layers": list(self.layers),
            "devices": [asdict(device) for device in self.devices],
            "hosts": [asdict(host) for host in self.hosts],
            "job": self.job.model_dump(mode="json"),
            "problem": _problem_json(self.problem) if self.problem is not None else None,
            "earlier": [{**vars(one), "plan": one.plan.to_json()} for one in self.earlier],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Planning:
        """Return the planning from which `to_json` made `value`.

        Raises LookupError, TypeError, ValueError, AttributeError, OverflowError or PlanError if nothing made it.
        """
        job = Job.model_validate(value["job"])
        hosts = tuple(
            Host(
                tuple(_whole(rank, 0, _MOST_RANKS) for rank in host["ranks"]),
                _number(host["cores"], above=0),
                _memory(host["memory"]),
                _name(host["machine"]),
                _number(host["machine_cores"]),
                _contention(host.get("contention", ())),  # which older versions do not have
            )
            for host in value["hosts"]
        )
        devices = tuple(DeviceFacts(**{str(key): _name(text) for key, text in one.items()}) for one in value["devices"])
        planning = cls(
            job=job,
            layers=tuple(_name(layer) for layer in value["layers"]),
            devices=devices,
            hosts=hosts,
            plan=Plan.from_json(value["plan"]),
            step=_whole(value["step"], 0),
            time=_number(value["time"]),
            started_as=tuple(_whole(rank, 0, _MOST_RANKS) for rank in value["started_as"]),
            problem=_problem(value["problem"], job, hosts) if value["problem"] is not None else None,
            seconds=_number(value["seconds"]) if value["seconds"] is not None else None,
            measured=value["measured"] is True,
            reasons=tuple(_name(text, _MOST_REASON) for text in value.get("reasons", [])[:_MOST_REASONS]),
            tried=Tried.from_json(value["tried"]) if value.get("tried") is not None else None,
            earlier=tuple(_earlier(one) for one in value["earlier"]),
        )
        planning._check()
        return planning

    def _check(self) -> None:
        """Raise ValueError or PlanError unless all parts speak of the same ranks and layers."""
        ranks = len(self.devices)
        if not 1 <= ranks <= _MOST_RANKS or len(self.started_as) != ranks:
            raise ValueError(f"there are {ranks} devices for {len(self.started_as)} ranks")
        if sorted(rank for host in self.hosts for rank in host.ranks) != list(range(ranks)):
            raise ValueError(f"the hosts do not have the ranks 0 to {ranks - 1}")
        self.plan.check(len(self.layers), ranks)
        for stage in self.plan.stages:
            if not all(type(rank) is int for rank in stage.ranks) or not all(map(math.isfinite, stage.shares)):
                raise ValueError("a stage has no whole ranks or finite shares")
        if self.problem is None:
            return
        if len(self.problem.watts) not in (0, ranks):
            raise ValueError("the watts are those of other ranks")
        if self.problem.ranks != ranks or any(len(one.layers) != len(self.layers) for one in self.problem.profiles):
            raise ValueError("the profiles are of other ranks or layers")
        network = self.problem.network
        if network.access and len(network.access) != ranks:
            raise ValueError("the links are those of other ranks")
        if any(not (0 <= a < ranks and 0 <= b < ranks) for a, b in network.pairs):
            raise ValueError("a link is that of an unknown rank")


def write_planning(folder: Path, planning: Planning) -> None:
    """Write a planning into a run's folder, with a line for the one that it replaces. Raises OSError.

    If the same ranks go on and nobody knows any longer what was measured, it is taken from the one before.
    """
    try:
        before = read_planning(folder)
    except HorizonError:  # a damaged file is replaced
        before = None
    if before is not None:
        last = Earlier(before.step, before.time, len(before.devices), before.seconds, before.plan)
        planning = replace(planning, earlier=(*before.earlier, last)[-_MOST_EARLIER:])
        same = (before.started_as, before.plan, before.layers) == (planning.started_as, planning.plan, planning.layers)
        if same and before.measured and not planning.measured:
            kept = (before.problem, before.seconds, before.reasons)
            planning = replace(planning, problem=kept[0], seconds=kept[1], reasons=kept[2], measured=True)
    write_atomically(folder / FILE, json.dumps(planning.to_json()).encode())


def read_planning(folder: Path) -> Planning | None:
    """Return what a run is planned for, or None if its folder does not say it, as that of an older version.

    Raises HorizonError if the file is damaged.
    """
    path = folder / FILE
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HorizonError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        value = json.loads(content)
        if value["format"] != _FORMAT:
            raise ValueError(f"its format is {str(value['format'])[:20]}, and this version reads {_FORMAT}")
        return Planning.from_json(value)
    except ValidationError:
        problem = "its job is not one of this version"
    except RecursionError:
        problem = "it is nested too deeply"
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, PlanError) as error:
        problem = printable(f"{type(error).__name__}: {error}", 200)
    raise HorizonError(f"{path} is damaged, or was written by another version of HorizonML ({problem})")


def _problem_json(problem: Problem) -> dict[str, Any]:
    """Return a problem as a JSON object, without what follows from the job and the hosts; equal profiles stand once."""
    profiles: list[Profile] = []
    places = []
    for profile in problem.profiles:
        place = next((number for number, known in enumerate(profiles) if known is profile or known == profile), None)
        places.append(len(profiles) if place is None else place)
        if place is None:
            profiles.append(profile)
    network = problem.network
    return {
        "profiles": [profile.to_json() for profile in profiles],
        "profile_of": places,  # every rank
        "network": {
            "latency": network.latency,
            "bandwidth": network.bandwidth,
            "access": list(network.access),
            "pairs": [[a, b, *link] for (a, b), link in network.pairs.items()],
        },
        "optimizer_copies": problem.optimizer_copies,
        "last_batch": problem.last_batch,
        "synced_bytes": {name: list(sizes) for name, sizes in problem.synced_bytes.items()},
        "loading": asdict(problem.loading),
        "watts": [watts.to_json() if watts is not None else None for watts in problem.watts],
        "steps": problem.objective.steps,
    }


def _problem(value: Mapping[str, Any], job: Job, hosts: Sequence[Host]) -> Problem:
    profiles = [Profile.from_json(one) for one in value["profiles"]]
    for profile in profiles:
        check_profile(profile)
    network = value["network"]
    return Problem(
        [profiles[_whole(place, 0, len(profiles))] for place in value["profile_of"]],
        hosts,
        Network(
            _number(network["latency"]),
            _number(network["bandwidth"], above=0),
            tuple(_number(rate, above=0) for rate in network["access"]),
            {
                (_whole(a, 0), _whole(b, 0)): (_number(latency), _number(bandwidth, above=0))
                for a, b, latency, bandwidth in network["pairs"]
            },
        ),
        job.batch_size,
        _whole(value["optimizer_copies"], 0),
        _whole(value["last_batch"], 0),
        {
            Sync.named(name).name: [_whole(size, 0) for size in sizes]
            for name, sizes in (value.get("synced_bytes") or {"powersgd": value.get("powersgd_bytes")}).items()
            if sizes
        },
        constraints_of(job.parallel),
        Loading(**{str(key): _whole(number, 0) for key, number in value["loading"].items()}),
        [Watts.from_json(watts) if watts is not None else None for watts in value.get("watts", [])],
        objective_of(job.parallel, _whole(value.get("steps", 0), 0)),
    )


def _earlier(value: Mapping[str, Any]) -> Earlier:
    seconds = value["seconds"]
    return Earlier(
        _whole(value["step"], 0),
        _number(value["time"]),
        _whole(value["ranks"], 1),
        _number(seconds) if seconds is not None else None,
        Plan.from_json(value["plan"]),
    )


def _whole(value: Any, low: int, end: int | None = None) -> int:
    if type(value) is not int or value < low or (end is not None and value >= end):
        raise ValueError(f"{str(value)[:40]} is not a whole number from {low}")
    return value


def _number(value: Any, above: float | None = None) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf or (above is not None and value <= above):
        raise ValueError(f"{str(value)[:40]} is not a number of this kind")
    return float(value)


def _contention(value: Any) -> Contention:
    """Return how much longer work takes while several cores compute, if the file says it as `Host` does."""
    points = [(_number(cores, above=0), _number(factor, above=0)) for cores, factor in value]
    if len(points) > _MOST_RANKS or points != sorted(points):
        raise ValueError("the contention on a machine is not in the order of its cores")
    return tuple(points)


def _memory(value: Any) -> float:
    """Return the bytes that a rank may use, which may be endless, or negative where processes take too many."""
    if type(value) not in (int, float) or math.isnan(value):
        raise ValueError(f"{str(value)[:40]} is no memory")
    return float(value)


def _name(value: Any, most: int = _MOST_NAME) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is no text")
    return printable(value, most)
