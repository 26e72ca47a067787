"""Writes down what a run is planned for, so that it can be planned again on paper; and reads it back, with suspicion.

The file `planning.json` in a run's folder holds the newest plan with everything that it was made of: the devices, the
measured links, the profiles and the job. Of the plans before it, it holds a line each.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, ValidationError, ValidationInfo

from horizonml.errors import HorizonError, PlanError
from horizonml.files import write_atomically
from horizonml.job.schema import Job
from horizonml.plan.lossy import Tried
from horizonml.plan.plan import Plan, Sync
from horizonml.planner.problem import Loading, Problem, Watts
from horizonml.planner.profile import Host, Name, Network, Number, Profile, Whole, adapter
from horizonml.planner.strategies import problem_for
from horizonml.text import printable

FILE = "planning.json"
_FORMAT = 1
_MOST_BYTES = 64 << 20
_MOST_EARLIER = 100
_MOST_RANKS = 4096

_Watts = Annotated[Watts, PlainValidator(Watts.from_json), PlainSerializer(Watts.to_json)]
_Profile = Annotated[Profile, PlainValidator(Profile.from_json), PlainSerializer(Profile.to_json)]
_Plan = Annotated[Plan, PlainValidator(Plan.from_json), PlainSerializer(Plan.to_json)]
_Tried = Annotated[Tried, PlainValidator(Tried.from_json), PlainSerializer(Tried.to_json)]
_Reason = Annotated[str, AfterValidator(lambda text: printable(text, 1000))]


@dataclass(frozen=True)
class _Measured:
    """Is a problem in the file: without what follows from the job and the hosts; equal profiles stand once."""

    profiles: list[_Profile]
    profile_of: list[Whole]  # every rank
    network: Network
    optimizer_copies: Whole
    last_batch: Whole
    loading: Loading
    synced_bytes: dict[Name, list[Whole]] = field(default_factory=dict)
    watts: list[_Watts | None] = field(default_factory=list)
    steps: Whole = 0

    @classmethod
    def of(cls, problem: Problem) -> _Measured:
        profiles: list[Profile] = []
        places = []
        for profile in problem.profiles:
            place = next(
                (number for number, known in enumerate(profiles) if known is profile or known == profile), None
            )
            places.append(len(profiles) if place is None else place)
            if place is None:
                profiles.append(profile)
        copies, last, loading = problem.optimizer_copies, problem.last_batch, problem.loading
        synced = {name: list(sizes) for name, sizes in problem.synced_bytes.items()}
        watts, steps = list(problem.watts), problem.objective.steps
        return cls(profiles, places, problem.network, copies, last, loading, synced, watts, steps)

    def problem(self, job: Job, hosts: tuple[Host, ...]) -> Problem:
        if len(self.profile_of) != sum(len(host.ranks) for host in hosts):
            raise ValueError("the profiles are of other ranks")
        profiles = [self.profiles[place] for place in self.profile_of]
        synced = {Sync.named(name).name: sizes for name, sizes in self.synced_bytes.items() if sizes}
        given = self.network, self.optimizer_copies, self.last_batch, synced, self.loading, self.watts, self.steps
        return problem_for(job, profiles, hosts, *given)


def _problem(value: Any, info: ValidationInfo) -> Problem | None:
    """Return the problem of a planning whose job and hosts were read already."""
    if value is None or not {"job", "hosts"} <= info.data.keys():
        return None
    measured: _Measured = adapter(_Measured).validate_python(value)
    return measured.problem(info.data["job"], info.data["hosts"])


def _problem_json(problem: Problem | None) -> Any:
    return adapter(_Measured).dump_python(_Measured.of(problem), mode="json") if problem is not None else None


@dataclass(frozen=True)
class DeviceFacts:
    """Says which machine a rank is on."""

    name: Name
    processor: Name = ""
    architecture: Name = ""
    node: Name = ""  # identifies the machine


@dataclass(frozen=True)
class Earlier:
    """Tells of a plan that another one has replaced."""

    step: Whole  # steps that were done when training by it began
    time: Number
    ranks: Whole
    seconds: Number | None  # that a step was predicted to take
    plan: _Plan


@dataclass(frozen=True)
class Planning:
    """Holds a run's plan and what it was made of.

    Where the job's strategy leaves nothing to choose, nothing is `measured`: then `problem` and `seconds` rest on a
    profile that rank 0's device had from before, and on no links at all, or are None.
    """

    job: Job
    layers: tuple[Name, ...]  # their names
    devices: tuple[DeviceFacts, ...]  # of the ranks
    hosts: tuple[Host, ...]
    plan: _Plan
    step: Whole  # steps that were done when training by this plan began
    time: Number  # Unix time
    started_as: tuple[Whole, ...]  # the rank that each rank was started as
    problem: Annotated[Problem | None, PlainValidator(_problem), PlainSerializer(_problem_json)] = None
    seconds: Number | None = None  # that a step is predicted to take
    measured: Annotated[bool, Field(strict=True)] = False  # whether the devices and links of the problem were measured
    reasons: tuple[_Reason, ...] = ()  # a sentence for each choice of the plan
    tried: _Tried | None = None  # what a trial of lossy formats has found
    earlier: tuple[Earlier, ...] = ()

    @property
    def names(self) -> list[str]:
        """Return a name for every rank's device that no other has."""
        given = [device.name for device in self.devices]
        return [name if given.count(name) == 1 else f"{name}-rank{rank}" for rank, name in enumerate(given)]

    def to_json(self) -> dict[str, object]:
        """Return the planning as a JSON object."""
        return {"format": _FORMAT, **adapter(Planning).dump_python(self, mode="json")}

    @classmethod
    def from_json(cls, value: Any) -> Planning:
        """Return the planning from which `to_json` made `value`.

        Raises LookupError, TypeError, ValueError, AttributeError, OverflowError or PlanError if nothing made it.
        """
        planning: Planning = adapter(Planning).validate_python(value)
        planning._check()
        return planning

    def _check(self) -> None:
        """Raise ValueError or PlanError unless all parts speak of the same ranks and layers."""
        ranks = len(self.devices)
        if not 1 <= ranks <= _MOST_RANKS or len(self.started_as) != ranks:
            raise ValueError(f"there are {ranks} devices for {len(self.started_as)} ranks")
        if sorted(rank for host in self.hosts for rank in host.ranks) != list(range(ranks)):
            raise ValueError(f"the hosts do not have the ranks 0 to {ranks - 1}")
        if any(list(host.contention) != sorted(host.contention) for host in self.hosts):
            raise ValueError("the contention on a machine is not in the order of its cores")
        self.plan.check(len(self.layers), ranks)
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
    """Return what a run is planned for, or None if its folder does not say it.

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
    except ValidationError as error:
        first = error.errors()[0]
        problem = printable(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", 200)
    except RecursionError:
        problem = "it is nested too deeply"
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, PlanError) as error:
        problem = printable(f"{type(error).__name__}: {error}", 200)
    raise HorizonError(f"{path} is damaged, or was written by another version of HorizonML ({problem})")
