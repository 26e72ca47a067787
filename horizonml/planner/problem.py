"""Defines the planner's problem: devices, links, a model, the constraints on plans, and what a plan is made for."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from horizonml.errors import PlanError
from horizonml.plan.local import Local
from horizonml.plan.lossy import Tried
from horizonml.plan.syncs import FORMATS, Sync
from horizonml.planner.profile import Host, Network, Profile, Whole

MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
MOST_WATTS = 1e5
FOR_STEPS = 0.9  # of a deadline; the rest is for evaluations, checkpoints and the start, which are not predicted


@dataclass(frozen=True)
class Watts:
    """Says what a rank's device draws while it waits, and while it computes or transfers."""

    idle: float
    busy: float

    @property
    def added(self) -> float:
        """Return what working adds to what the device draws anyway."""
        return max(0.0, self.busy - self.idle)

    def to_json(self) -> list[float]:
        """Return the watts as a JSON array."""
        return [self.idle, self.busy]

    @classmethod
    def from_json(cls, value: Any) -> Watts:
        """Return the watts from which `to_json` made `value`. Raises ValueError or TypeError if nothing made it."""
        idle, busy = value
        if not all(type(one) in (int, float) for one in (idle, busy)) or not 0 <= idle <= busy <= MOST_WATTS:
            raise ValueError(f"{str(value)[:60]} are not the watts of a device")
        return cls(float(idle), float(busy))


@dataclass(frozen=True)
class Objective:
    """Says by what a plan is chosen among those that can be carried out."""

    kind: str = "time"  # or "energy", or "deadline"
    slowdown: float = 2.0  # with "energy", a step takes at most so many times as long as the fastest plan's
    deadline: float | None = None  # with "deadline", the seconds in which a run of so many `steps` is to end
    steps: int = 0

    def limit(self, fastest: float) -> float:
        """Return how long a step may take if that of the fastest plan takes `fastest` seconds."""
        if self.kind == "deadline" and self.deadline is not None:
            return FOR_STEPS * self.deadline / max(1, self.steps)
        return self.slowdown * fastest if self.kind == "energy" else fastest


FASTEST = Objective()


def check_watts(objective: Objective, watts: Sequence[Watts | None], names: Sequence[str]) -> None:
    """Raise PlanError if the objective needs the watts of a device that neither measures nor states them."""
    unknown = [name for rank, name in enumerate(names) if rank >= len(watts) or watts[rank] is None]
    if objective.kind == "time" or not unknown:
        return
    several = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    raise PlanError(
        f"parallel.objective: {objective.kind} needs the watts of every device, and those of {unknown[0]}{several} are "
        "not known: nothing there measures them. State them: in a file of devices as `watts: {idle: 2.5, busy: 6}`, "
        "for a rank as HORIZONML_WATTS=2.5/6 in its environment. Or set parallel.objective: time"
    )


@dataclass(frozen=True)
class FixedStage:
    """Holds what a job says about a stage: its ranks, their shares, and possibly its layers `(start, stop)`."""

    ranks: tuple[int, ...]
    shares: tuple[float, ...]
    sync: Sync
    send: str
    layers: tuple[int, int] | None = None


@dataclass(frozen=True)
class Constraints:
    """Constrains the plans that may be made; by default every plan is allowed.

    `ordered` plans give consecutive ranks to consecutive stages, and equal shares to the members of a stage. `formats`
    are those that may travel between stages, the most precise first. A schedule other than the first is chosen only for
    a gain that is worth it. `syncs` are ways to sum that each stage may choose besides `sync`, the most precise first,
    and `every` says after how many steps members that take local steps may agree; `local` is what the job asks for.
    `trial` says how a run finds out what the formats that the planner chooses cost in accuracy.
    """

    least_stages: int = 1
    most_stages: int | None = None
    most_members: int | None = None  # of a stage
    replicated: bool = False  # whether some stage must have several members
    ordered: bool = False
    one_profile: bool = False  # whether cuts follow rank 0's profile, whatever the other devices are
    stages: tuple[FixedStage, ...] | None = None
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    formats: tuple[str, ...] = ("fp32",)
    schedules: tuple[str, ...] = ("1f1b",)
    sync: Sync = Sync.ALL_REDUCE  # of stages with several members
    syncs: tuple[Sync, ...] = ()
    every: tuple[int, ...] = ()
    local: Local | None = None
    trial: str = (
        "before it trains, a run measures on a warm-up what they cost in accuracy, and replaces each that costs too "
        "much by a more precise one"
    )

    @property
    def is_exact(self) -> bool:
        """Return whether the planner has nothing to choose that is less exact than something else."""
        return len(self.formats) == 1 and not self.syncs and not self.every

    def exactly(self) -> Constraints:
        """Return these constraints with the most precise of what they leave open."""
        return replace(self, formats=self.formats[:1], syncs=(), every=())

    def without_trial(self, why: str) -> Constraints:
        """Return these constraints for a run that tries nothing: without what would have to be tried."""
        return replace(
            self,
            formats=tuple(name for name in self.formats if not FORMATS[name].tried_first or len(self.formats) == 1),
            syncs=tuple(sync for sync in self.syncs if not sync.tried_first),
            trial=f"what would have to be tried on a warm-up first is not used, as {why}",
        )

    def after(self, tried: Tried) -> Constraints:
        """Return these constraints for a run that has tried formats, or has found that it cannot: see `Guard`."""
        if self.is_exact:
            return self
        if not tried.steps:
            return self.without_trial("this run has nothing to try it on, or too little")
        precise = list(FORMATS)[: list(FORMATS).index(tried.least_format) + 1]
        return replace(
            self,
            formats=tuple(name for name in self.formats if name in precise or len(self.formats) == 1),
            syncs=tuple(sync for sync in self.syncs if tried.may_sum(sync)),
            trial="this run has measured on a warm-up what they cost in accuracy, and uses none that costs too much",
        )

    @property
    def cuts(self) -> tuple[int, ...] | None:
        """Return the layers at which stages begin, except the first, or None if the planner may choose them."""
        if self.stages is None or any(stage.layers is None for stage in self.stages):
            return () if self.stages is not None and len(self.stages) == 1 else None
        return tuple(stage.layers[0] for stage in self.stages[1:] if stage.layers is not None)

    def fewest_stages(self, ranks: int) -> int:
        """Return the fewest stages that a plan for `ranks` ranks has."""
        if self.stages is not None:
            return len(self.stages)
        return max(self.least_stages, -(-ranks // self.most_members) if self.most_members else 1)

    def highest_stages(self, ranks: int, layers: int) -> int:
        """Return the most stages that a plan for `ranks` ranks and `layers` layers has."""
        if self.stages is not None:
            return len(self.stages)
        return min(self.most_stages or ranks, ranks - self.replicated, layers)


@dataclass(frozen=True)
class Loading:
    """Says what the samples take that ranks load ahead of the step: bytes of a sample's parts, and the limits."""

    input_bytes: Whole = 0
    target_bytes: Whole = 0
    batches: Whole = 0  # ahead of the one that is trained on; 0 if nothing is loaded ahead
    memory: Whole = 0  # bytes of all these together

    def held(self, input_rows: int, target_rows: int) -> int:
        """Return the bytes that a rank holds that needs so many rows of a batch."""
        if not self.batches:
            return 0
        batch = input_rows * self.input_bytes + target_rows * self.target_bytes
        return batch + min(self.memory, self.batches * batch)


NO_LOADING = Loading()


@dataclass(frozen=True)
class Problem:
    """Describes the devices, links and model for which plans are made, and the constraints on the plans.

    `profiles[r]` is the profile of rank r's device. `optimizer_copies` is how many numbers the optimizer keeps per
    parameter: 1 for momentum SGD, 2 for Adam, 0 for plain SGD. `last_batch` is the size of an epoch's last batch where
    that is smaller than `batch_size`, else 0. `synced_bytes[s][l]` is what members that agree by the sync s sum of
    layer l's gradients; it has the syncs for which that depends on the parameters' shapes. `watts[r]` are those of rank
    r's device, where they are known.
    """

    profiles: Sequence[Profile]
    hosts: Sequence[Host]
    network: Network
    batch_size: int
    optimizer_copies: int
    last_batch: int = 0
    synced_bytes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    constraints: Constraints = Constraints()
    loading: Loading = NO_LOADING
    watts: Sequence[Watts | None] = ()
    objective: Objective = FASTEST

    @property
    def layers(self) -> int:
        """Return the number of layers of the model."""
        return len(self.profiles[0].layers)

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.profiles)

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Return the numbers of micro-batches that a plan may have."""
        return tuple(number for number in self.constraints.micro_batches if number <= self.batch_size)

    @functools.cached_property
    def oversubscription(self) -> dict[int, float]:
        """Return the factor by which each rank computes longer because others compute on its host or machine, too."""
        return {
            rank: host.oversubscription * host.crowded * host.cores / left
            for host, left in zip(self.hosts, self.cores, strict=True)
            for rank in host.ranks
        }

    @functools.cached_property
    def cores(self) -> list[float]:
        """Return the cores of each host that are left for training; of a quota, waiting takes a part."""
        return [
            max(host.cores / 2, host.cores - sum(self.profiles[rank].waiting_cores for rank in host.ranks))
            if host.cores < 1
            else host.cores
            for host in self.hosts
        ]

    @functools.cached_property
    def host_of(self) -> dict[int, int]:
        """Return the number of the host that each rank is on."""
        return {rank: number for number, host in enumerate(self.hosts) for rank in host.ranks}

    @functools.cached_property
    def machines(self) -> dict[str, list[int]]:
        """Return the ranks of each machine; a host that names none is one by itself."""
        found: dict[str, list[int]] = {}
        for number, host in enumerate(self.hosts):
            found.setdefault(host.machine or f" {number}", []).extend(host.ranks)
        return found

    def apart(self, one: int, other: int) -> bool:
        """Return whether what two ranks send each other crosses machines."""
        return self.host_of[one] != self.host_of[other]

    @functools.cached_property
    def memory(self) -> dict[int, float]:
        """Return the bytes that each rank may use."""
        return {rank: host.memory for host in self.hosts for rank in host.ranks}
