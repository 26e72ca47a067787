"""The plan as data: stages, their members and shares, how layers run, and the strategies that constrain it.

Every way of training is such a plan, and one engine runs them all. This module is plain data and arithmetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

from horizonml.errors import PlanError
from horizonml.plan.local import Local
from horizonml.plan.schedules import SCHEDULES, Action, Lanes, evaluation, with_update
from horizonml.plan.syncs import FORMATS as FORMATS
from horizonml.plan.syncs import SYNCS as SYNCS
from horizonml.plan.syncs import Sync as Sync
from horizonml.text import count

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Execution:
    """Describes how a device runs all layers that it has."""

    channels_last: bool = False
    precision: Literal["fp32", "bf16"] = "fp32"
    """With bf16: autocast, with float32 parameters and float32 sums of gradients."""
    channels_last_weights: bool = False
    """Whether convolutions keep their weights in the memory format channels_last, on all ranks alike."""

    @property
    def words(self) -> str:
        """Return a few words on how layers run."""
        found = ["channels_last"] * self.channels_last + ["bf16"] * (self.precision == "bf16")
        return " and ".join(found) or "plain"

    def among(self, everyone: Collection[Execution]) -> Execution:
        """Return the execution of a rank among those of `everyone`, itself included.

        What members of a stage sum lies in memory as their weights do, so weights are channels_last only if all ranks
        run so. Elsewhere a convolution in that format converts its weights each time.
        """
        return replace(self, channels_last_weights=all(one.channels_last for one in everyone))

    def exact(self) -> Execution:
        """Return the execution in float32."""
        return replace(self, precision="fp32")


PLAIN = Execution()


@dataclass(frozen=True)
class StrategyFacts:
    """States what a strategy fixes: a row of `STRATEGIES`."""

    min_workers: int = 1
    max_workers: int | None = None  # None means no limit
    least_stages: int = 1
    most_stages: int | None = None
    most_members: int | None = None  # of a stage
    sync: Sync = Sync.ALL_REDUCE  # of stages with several members
    is_free: bool = False  # whether the planner measures every device, and chooses the kind of plan, too
    local_steps: bool = False  # whether its ranks may take local steps

    @property
    def sums(self) -> bool:
        """Return whether a stage may have several members, which sum gradients."""
        return self.max_workers != 1 and self.most_members != 1

    @property
    def sends(self) -> bool:
        """Return whether activations may travel between stages."""
        return self.most_stages != 1

    @property
    def micro_batches(self) -> bool:
        """Return whether batches may be split into micro-batches."""
        return not self.sync.alone

    @property
    def compressions(self) -> list[str]:
        """Return the values of `parallel.gradient_compression` that it can use."""
        found = [one.compression for one in SYNCS.values() if one.compression and one.exactly is self.sync]
        return found if self.sums else []


STRATEGIES = {
    "single": StrategyFacts(max_workers=1, most_stages=1),
    "ddp": StrategyFacts(most_stages=1, local_steps=True),
    "pipeline": StrategyFacts(most_members=1),
    "hybrid": StrategyFacts(min_workers=3, least_stages=2),
    "auto": StrategyFacts(is_free=True, local_steps=True),
    "tensor": StrategyFacts(most_stages=1, sync=Sync.CHANNELS),
    "horovod": StrategyFacts(most_stages=1, sync=Sync.HOROVOD),
}
EXPLICIT = "explicit stages"  # what a plan of `parallel.stages` is called, unless its sync has a strategy of its own
_EXPLICIT = StrategyFacts(local_steps=True)


def facts_of(strategy: str) -> StrategyFacts:
    """Return what a strategy fixes, or what explicit stages do."""
    return STRATEGIES.get(strategy, _EXPLICIT)


MOST_MICRO_BATCHES = 1 << 14


NO_ROWS = 1e-9  # the share, relative to the largest, of a member that is left without samples
_ALMOST = 0.02  # of an equal part of a batch
PARTS_REPEAT = 64  # steps, after which members that take local steps have the same parts of batches again


@dataclass(frozen=True)
class Stage:
    """Describes consecutive layers, `start` to `stop - 1`, held by `ranks`.

    `shares[i]` of the samples of every micro-batch go to `ranks[i]`, and each rank holds all the layers; members that
    take local steps have such a part of each batch, on average. Where `sync` is CHANNELS, `ranks[i]` holds `shares[i]`
    of the layers' channels instead, and all samples go to all ranks. `send` is the format (one of `FORMATS`) of
    activations on their way to the next stage, and of their gradients on the way back. A rank may be a member of
    several stages.
    """

    start: int
    stop: int
    ranks: tuple[int, ...]
    shares: tuple[float, ...]
    sync: Sync = Sync.ALL_REDUCE
    send: str = "fp32"

    @property
    def splits_channels(self) -> bool:
        """Return whether the members split channels instead of samples."""
        return self.sync.splits_channels and len(self.ranks) > 1

    def parts(self, things: int, step: int | None = None) -> list[tuple[int, int]]:
        """Return each member's part `[first, end)` of `things` items, in the order of `ranks`.

        The parts are consecutive, cover everything, and follow the shares as closely as whole items allow. A member's
        part may be empty. With a `step`, they vary from step to step, so that they follow the shares on average: every
        end is rounded down after adding the same number from 0 to 1, and these numbers are spread evenly.
        """
        ends = [things * taken / self._taken[-1] for taken in self._taken]
        if step is None:
            return list(pairwise(map(round, ends)))
        added = (int(f"{step % PARTS_REPEAT:06b}"[::-1], 2) + 0.5) / PARTS_REPEAT
        return list(pairwise(math.floor(end + added) for end in ends))

    @property
    def paces(self) -> list[float]:
        """Return how many equal parts of a batch each member has; those of almost 1 are 1, as they update alike."""
        parts = [(end - first) * len(self.ranks) / self._taken[-1] for first, end in pairwise(self._taken)]
        return [1.0 if abs(part - 1) < _ALMOST else part for part in parts]

    @functools.cached_property
    def _taken(self) -> tuple[float, ...]:
        """Return what the members before each one have together, in the unit of the shares, and what all have."""
        # Added one by one, as `sum` is more precise since Python 3.12, and all ranks must agree.
        least = NO_ROWS * max(self.shares)
        return tuple(accumulate((share if share > least else 0.0 for share in self.shares), initial=0.0))

    def rows(self, samples: int) -> list[tuple[int, int]]:
        """Return the rows `[first, end)` of a micro-batch that each member works on, in the order of `ranks`."""
        return [(0, samples)] * len(self.ranks) if self.splits_channels else self.parts(samples)

    def mean_rows(self, samples: int) -> Sequence[tuple[float, float]]:
        """Return such rows, or of members that take local steps what these are on average."""
        if not self.sync.steps_alone:
            return self.rows(samples)
        return list(pairwise(samples * taken / self._taken[-1] for taken in self._taken))


@dataclass(frozen=True)
class Plan:
    """Holds a way of training: its stages in order, its schedule, and the number of micro-batches in a full batch.

    With `local`, all stages have the same number of members with the same shares. The members with the same place in
    their stages are a replica of the model, which trains by itself between synchronisations.
    """

    stages: tuple[Stage, ...]
    schedule: str = "1f1b"
    micro_batches: int = 1
    local: Local | None = None  # how the members of stages whose sync is LOCAL agree
    spare: tuple[int, ...] = ()  # ranks that hold no layers: they only agree with the others when a step ends

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self._held) + len(self.spare)

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        return self.stages[-1].stop

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the stages that `rank` is a member of, in their order."""
        return self._held.get(rank, ())

    def stage_of(self, layer: int) -> int:
        """Return the number of the stage that `layer` belongs to."""
        return next(number for number, stage in enumerate(self.stages) if stage.start <= layer < stage.stop)

    @functools.cached_property
    def _held(self) -> dict[int, tuple[int, ...]]:
        """Return the numbers of the stages that each rank is a member of."""
        held: dict[int, tuple[int, ...]] = {}
        for number, stage in enumerate(self.stages):
            for rank in stage.ranks:
                held[rank] = (*held.get(rank, ()), number)
        return held

    @functools.cached_property
    def lanes(self) -> Lanes:
        """Return the distinct sets of stages that ranks hold, in the order of their first stages."""
        return tuple(sorted(set(self._held.values())))

    def idle(self, ranks: Collection[int]) -> Plan:
        """Return this plan with a share of 0 for some of its ranks, which stay members of their stages."""
        idle = [
            tuple(0.0 if rank in ranks else share for rank, share in zip(stage.ranks, stage.shares, strict=True))
            for stage in self.stages
        ]
        return replace(
            self, stages=tuple(replace(s, shares=shares) for s, shares in zip(self.stages, idle, strict=True))
        )

    def without(self, ranks: Collection[int]) -> Plan:
        """Return this plan without some of its ranks; each stage must have another one."""
        kept = [[place for place, rank in enumerate(stage.ranks) if rank not in ranks] for stage in self.stages]
        stages = [
            replace(s, ranks=tuple(s.ranks[p] for p in places), shares=tuple(s.shares[p] for p in places))
            for s, places in zip(self.stages, kept, strict=True)
        ]
        return replace(self, stages=tuple(stages))

    def actions(self, rank: int, micro_batches: int) -> list[Action]:
        """Return what `rank` does, in order, in a training step of `micro_batches` micro-batches."""
        if rank in self.spare:
            return []
        passes = SCHEDULES[self.schedule].passes(self.lanes.index(self.stages_of(rank)), self.lanes, micro_batches)
        return with_update(passes)

    def evaluation(self, rank: int, micro_batches: int) -> list[Action]:
        """Return what `rank` does in an evaluation of `micro_batches` micro-batches."""
        return evaluation(self.stages_of(rank), micro_batches, len(self.lanes))

    def micro_sizes(self, batch: int, full_batch: int) -> list[int]:
        """Return the sizes of the micro-batches of a batch, in order.

        A batch smaller than `full_batch` has fewer micro-batches of about the usual size, so that a small remainder is
        not split too finely. Sizes differ by one at most.
        """
        assert batch > 0
        usual = -(-full_batch // self.micro_batches)
        number = min(batch, -(-batch // usual), self.micro_batches)
        small, more = divmod(batch, number)
        return [small + (index < more) for index in range(number)]

    def check(self, layers: int, world_size: int) -> None:
        """Raise PlanError unless the plan covers these layers and ranks."""
        ranks = sorted({rank for stage in self.stages for rank in stage.ranks}.union(self.spare))
        if len(set(self.spare)) < len(self.spare) or not self._held.keys().isdisjoint(self.spare):
            raise PlanError(f"the plan's spare ranks, {list(self.spare)}, must differ, and hold no layers")
        if ranks != list(range(world_size)):
            raise PlanError(f"the plan is for ranks {ranks}, but the world size is {world_size}")
        if self.schedule not in SCHEDULES:
            raise PlanError(f"the plan's schedule is {self.schedule!r}; there are {', '.join(SCHEDULES)}")
        if not 1 <= self.micro_batches <= MOST_MICRO_BATCHES:
            raise PlanError(f"the plan has {self.micro_batches} micro-batches; there can be 1 to {MOST_MICRO_BATCHES}")
        expected = 0
        for number, stage in enumerate(self.stages):
            if stage.start != expected or stage.stop <= stage.start:
                raise PlanError(
                    f"stage {number} of the plan has layers {stage.start} to {stage.stop - 1}; "
                    f"it must start at layer {expected} and hold at least one"
                )
            if len(stage.shares) != len(stage.ranks) or not all(0 < share < math.inf for share in stage.shares):
                raise PlanError(f"stage {number} of the plan needs a share above 0 for each of its ranks")
            if len(set(stage.ranks)) < len(stage.ranks):
                raise PlanError(f"stage {number} of the plan names a rank twice")
            alone = stage.sync.alone
            if alone and len(self.stages) > 1:
                raise PlanError(f"stage {number} of the plan {alone}; only a plan of one stage can")
            if stage.send not in FORMATS:
                raise PlanError(f"stage {number} of the plan sends {stage.send!r}; there are {', '.join(FORMATS)}")
            expected = stage.stop
        if expected != layers:
            raise PlanError(
                f"the plan ends at layer {expected - 1}, but the model has {count(layers, 'layer')} (0 to {layers - 1})"
            )
        self._check_local()

    def _check_local(self) -> None:
        """Raise PlanError if some members take local steps, and the plan does not consist of whole replicas."""
        local = [stage.sync.steps_alone for stage in self.stages]
        if self.local is None:
            if any(local):
                raise PlanError("a stage of the plan takes local steps, but the plan does not say how often it syncs")
            return
        self.local.check()
        if not all(local):
            raise PlanError(f"stage {local.index(False)} of the plan takes no local steps; all stages must, or none")
        first = self.stages[0]
        for number, stage in enumerate(self.stages):
            if len(stage.ranks) < 2 or len(stage.ranks) != len(first.ranks):
                raise PlanError(
                    f"stage {number} of the plan has {count(len(stage.ranks), 'member')}, stage 0 has "
                    f"{len(first.ranks)}; with local steps all stages have the same number, which is at least 2"
                )
            if [stage.parts(1 << 20)] != [first.parts(1 << 20)]:
                raise PlanError(f"stage {number} of the plan has other shares than stage 0; local steps need the same")
        for rank, held in self._held.items():
            if len({self.stages[number].ranks.index(rank) for number in held}) > 1:
                raise PlanError(f"rank {rank} belongs to several replicas of the plan; with local steps it cannot")

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each replica that takes local steps, in the order of the stages' members."""
        if self.local is None:
            return ()
        members = zip(*(stage.ranks for stage in self.stages), strict=True)
        return tuple(tuple(sorted(set(ranks))) for ranks in members)

    def replica(self, place: int) -> Plan:
        """Return the plan by which one replica trains between synchronisations; its ranks are numbered anew."""
        ranks = self.replicas[place]
        stages = tuple(
            replace(stage, ranks=(ranks.index(stage.ranks[place]),), shares=(1.0,), sync=Sync.ALL_REDUCE)
            for stage in self.stages
        )
        return replace(self, stages=stages, local=None, spare=())

    def to_json(self) -> dict[str, object]:
        """Return the plan as a JSON object."""
        stages = [
            {
                "start": s.start,
                "stop": s.stop,
                "ranks": list(s.ranks),
                "shares": list(s.shares),
                "sync": s.sync.name,
                "send": s.send,
            }
            for s in self.stages
        ]
        local = {"local": self.local.to_json()} if self.local is not None else {}
        spare = {"spare": list(self.spare)} if self.spare else {}
        return {"stages": stages, "schedule": self.schedule, "micro_batches": self.micro_batches, **local, **spare}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Plan:
        """Return the plan from which `to_json` made `value`."""
        stages = tuple(
            Stage(
                int(s["start"]),
                int(s["stop"]),
                tuple(map(int, s["ranks"])),
                tuple(map(float, s["shares"])),
                # Plans in checkpoints of version 0.1 have "split" instead.
                Sync.named(str(s.get("sync", "channels" if s.get("split") == "channels" else "all-reduce"))),
                str(s.get("send", "fp32")),
            )
            for s in value["stages"]
        )
        local = Local.from_json(value["local"]) if value.get("local") is not None else None
        spare = tuple(map(int, value.get("spare", ())))
        return cls(stages, str(value["schedule"]), int(value["micro_batches"]), local, spare)

    def describe(self, names: Sequence[str] | None = None) -> str:
        """Return a description for people, with one line per stage; `names` are the names of the layers."""
        lines = []
        for number, stage in enumerate(self.stages):
            first, last = stage.start, stage.stop - 1
            span = f"layers {first} to {last}" if last > first else f"layer {first}"
            if names is not None:
                span += f" ({names[first]} .. {names[last]})" if last > first else f" ({names[first]})"
            who = ", ".join(
                f"rank {rank}" + (f" (share {share:g})" if len(set(stage.shares)) > 1 else "")
                for rank, share in zip(stage.ranks, stage.shares, strict=True)
            )
            lines.append(f"stage {number}: {who}: {span}" + (", split by channels" * stage.splits_channels))
            if stage.send != "fp32" and number + 1 < len(self.stages):
                lines[-1] += f", sends {stage.send}"
        if len(self.stages) > 1:
            lines.append(f"{self.schedule}, {count(self.micro_batches, 'micro-batch')}")
        if self.local is not None:
            lines.append(self.local.describe())
        if self.spare:
            lines.append(f"left out: {', '.join(f'rank {rank}' for rank in self.spare)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Route:
    """Describes rows `[start, stop)` of this rank's part of a micro-batch that travel to or from `peer`."""

    peer: int
    start: int
    stop: int


def routes(own: tuple[int, int], other: Stage, samples: int) -> list[Route]:
    """Return which members of the stage `other` hold a rank's rows `own` of a micro-batch of `samples`."""
    first, end = own
    found = []
    for peer, (low, high) in zip(other.ranks, other.rows(samples), strict=True):
        start, stop = max(first, low), min(end, high)
        if start < stop:
            found.append(Route(peer, start - first, stop - first))
    return found
