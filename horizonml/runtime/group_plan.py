"""What the ranks of a new group tell one another, all at once, and the plan that they then train by.

Each rank states what it knows: of its machine, the data, the model, the state in its memory, the plan, its disk. From
the same answers all ranks come to the same decisions, by functions that ask nobody. Only a rank that has to build the
model, or to prove how it can be cut, makes all of them state what they know once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field

from horizonml.comm.expected import AsJson, whole
from horizonml.comm.group import Group
from horizonml.data.choose import agree, describe
from horizonml.data.dataset import Data, DataInfo
from horizonml.errors import HorizonError, PeerLost, of_kind
from horizonml.machine.accelerator import computing
from horizonml.models.cutting import Cutting
from horizonml.models.zoo import Model
from horizonml.plan.plan import Execution, Plan
from horizonml.planner.profile import Host
from horizonml.planner.record import DeviceFacts
from horizonml.planner.strategies import may_cut
from horizonml.runtime.agreement import Agreed, check_weights, make_plan, model_for, optimizer_copies
from horizonml.runtime.checks import (
    Capacity,
    check_shared_parameters,
    is_checked,
    proven_cutting,
    refuse_what_cannot_fit,
)
from horizonml.runtime.guarding import Guard
from horizonml.runtime.life import Life
from horizonml.runtime.recording import device_facts
from horizonml.runtime.restore import Copies
from horizonml.runtime.stragglers import Decision, StragglerDetector
from horizonml.state.carry import Moves, holders, move, senders
from horizonml.state.checkpoint import Arrival, FoundCheckpoints
from horizonml.state.resume import Memory
from horizonml.state.runfolder import foreign
from horizonml.state.train_state import TrainState
from horizonml.tasks.choose import channels_for
from horizonml.text import human_bytes, human_seconds

_MOST_THREADS = 4096
_MOST_ROUNDS = 5  # of introductions; each follows something that a rank has built or found out
Say = Callable[[str], None]


@dataclass(frozen=True)
class Introduction:
    """What one rank knows."""

    problem: list[str] | None  # the kind and the text of what went wrong while this was prepared
    capacity: Capacity
    device: DeviceFacts
    fresh: bool  # whether the run is to start over here
    foreign: str | None  # why it must not
    moved_away: bool
    begun: bool
    info: Annotated[DataInfo, AsJson(DataInfo)] | None  # None if this rank does not have the data
    built: bool  # whether this rank has the model for it
    weights: str | None  # the digest of the model's pretrained weights
    checked: bool  # whether the model's shared parameters are known to be used as PyTorch does
    cutting: Annotated[Cutting, AsJson(Cutting)] | None  # how the model is cut, if that is proven
    memory: Memory
    copies: Copies | None  # of other ranks' state
    found: FoundCheckpoints | None  # in the folder of checkpoints
    newest_checkpoint: int | None
    threads: Annotated[int, Field(ge=1, le=_MOST_THREADS)] | None
    execution: Execution | None
    plan: Decision | None  # that is known for these ranks
    measured: bool  # whether what all these ranks measured is known
    seconds: float  # since training began


@dataclass
class Introductions:
    """Brings a group to one description of the data and one model, as one of its ranks."""

    life: Life
    group: Group
    name: str  # of this rank's machine
    arrival: Arrival | None
    say: Say
    problem: list[str] | None = None

    def exchange(self) -> list[Introduction]:
        """Return what all ranks know once each of them has the model, cut where that is proven.

        Raises HorizonError on all ranks if one of them cannot describe the data, or build the model.
        """
        for _ in range(_MOST_ROUNDS):
            told = self.group.exchange(self._own())
            for rank, one in enumerate(told):
                if one.problem is not None:
                    kind, words = one.problem
                    raise of_kind(kind, words if len(told) == 1 else f"{self.group.name(rank)}: {words}")
            if self._is_settled(told):
                return told
        raise PeerLost("the ranks do not come to one description of their model")

    def _own(self) -> Introduction:
        life, group = self.life, self.group
        info = self._try(self._described) if self.problem is None else life.info
        state = life.state
        model = state.model if state is not None else None
        plan = life.plans.get(tuple(self.group.started_as))
        last = life.last
        if last is not None and state is not None and set(last.members) <= set(self.group.started_as):
            last.mirror.keep_parts(state)  # the group has broken, but perhaps nothing is lost
        return Introduction(
            self.problem,
            Capacity.here(group, life.taken or 0),
            device_facts(self.name, group.hosts[group.rank]),
            life.fresh,
            foreign(life.job.run_folder) if not life.moved_away else None,
            life.moved_away,
            life.begun,
            info,
            model is not None,
            model.pretrained.digest if model is not None and model.pretrained is not None else None,
            model is None or is_checked(model),
            model.cutting if model is not None and model.proven else None,
            Memory.of(state, life.begun) if state is not None else Memory(),
            Copies.of(last) if last is not None else None,
            self.arrival.found if self.arrival is not None else None,
            life.newest_checkpoint,
            life.threads,
            life.execution,
            plan,
            life.measured_among(self.group.started_as) is not None,
            time.monotonic() - (life.started or time.monotonic()),
        )

    def _described(self) -> DataInfo | None:
        return self.life.info or describe(self.life.job.data, channels_for(self.life.job))

    def _try(self, action: Callable[[], Any]) -> Any:
        """Return what an action returns, or keep what went wrong for all ranks to know."""
        try:
            return action()
        except PeerLost:
            raise
        except HorizonError as error:
            self.problem = [type(error).__name__, str(error)]
            return None

    def _is_settled(self, told: Sequence[Introduction]) -> bool:
        """Take over what the ranks agree on; return whether nobody has built or found out anything for that.

        All ranks return the same.
        """
        life, job, group = self.life, self.life.job, self.group
        info = agree([one.info for one in told], job.data)
        fits = [one.built and one.info is not None and _alike(one.info, info) for one in told]
        if not fits[group.rank]:
            self._try(lambda: self._hold(model_for(job, info)))
        life.info = info
        if not all(fits):
            return False
        check_weights([one.weights for one in told])
        assert life.state is not None
        model = life.state.model
        if not all(one.checked for one in told):
            self._try(lambda: check_shared_parameters(job, model, info, tries=group.rank == 0))
            return False
        if not may_cut(job.parallel, group.world_size):
            return True
        cutting = next((one.cutting for one in told if one.cutting is not None), None)
        if cutting is None:
            if group.rank == 0:
                self._try(lambda: self._cut(model, proven_cutting(job, model, info, self.say)))
            return False
        self._cut(model, cutting)
        return not any(one.memory.held is not None and one.cutting != cutting for one in told)

    def _hold(self, model: Model) -> None:
        life = self.life
        local = life.job.parallel.may_take_local_steps
        life.state = TrainState(model, life.job.optimizer, life.job.ema, local, device=computing().device)

    def _cut(self, model: Model, cutting: Cutting) -> None:
        """Go on with the layers that a proven cut makes."""
        assert self.life.state is not None
        found = model.recut(cutting)
        found = found if found.proven else replace(found, proven=True)
        if found is not model:
            self.life.state.recut(found)


def _alike(one: DataInfo, other: DataInfo) -> bool:
    """Return whether two descriptions are of the same data; what cannot be read of it is known only after a look."""
    return replace(one, unreadable=None) == replace(other, unreadable=None)


@dataclass
class GroupPlan:
    """Agrees on the plan of a group, on what becomes of it after a trial, and on better ones; all ranks do the same."""

    life: Life
    group: Group
    names: Sequence[str]  # of the ranks' machines
    guard: Guard
    model: Model
    say: Callable[[str], None]
    agreed: Agreed = field(init=False)
    detector: StragglerDetector | None = None

    @property
    def plan(self) -> Plan:
        """Return the plan that the group trains by now."""
        return self.agreed.plan

    def agree(self, info: DataInfo, hosts: Sequence[Host], told: Sequence[Introduction]) -> None:
        """Take a plan that was made for the same ranks before, if any, as another one ends elsewhere by rounding.

        A rank that does not know it takes it over from one that does.
        """
        life, kept = self.life, self.life.plans.get(tuple(self.group.started_as))
        decided = next((one.plan for one in told if one.plan is not None), None)
        if decided is None:
            measured = life.measured_among(self.group.started_as)
            used = self.guard.execution()  # profiles are taken without bf16 as long as it is not allowed
            context = life.job, self.model, info, self.group, hosts, self.names, self.say, measured, used
            found = make_plan(*context, is_measured=told[0].measured)
            refuse_what_cannot_fit(found.plan, self.model, optimizer_copies(life.job), hosts, self.names)
            if found.measured is not None and found.measured is not measured:
                life.measured, life.measured_for = found.measured, self.group.started_as
        elif kept is not None and kept.plan.to_json() == decided.plan.to_json() and kept.forecast == decided.forecast:
            found = kept  # which, on rank 0, also knows the problem
        else:
            found = Agreed(decided.plan, decided.forecast)
        found.plan.check(len(self.model.chain), self.group.world_size)  # it may be another rank's
        self._remember(found)

    def settle(self, data: Data, following: bool) -> None:
        """Try lossy formats of the plan, if it has any that need it; go on without those that may not be used.

        The ranks hold the state that training goes on from, or are `following` the others; there is no session.
        """
        state, before = self.life.state, self.agreed
        assert state is not None
        plan = self.guard.settle(before.plan, data, following)
        found = self.guard.plan_again(before, plan, search=state.tried is not None and not following)
        if state.tried is None or following:  # so the next group tries the plan itself
            self.agreed = found
            return
        moves = senders(holders(plan), found.plan)
        if moves or found.plan.stages != plan.stages:
            self.say("with these formats, another plan is better:")
            self.say(found.plan.describe(self.model.chain.names))
        if moves:
            self.say(self._move(moves))
        self._remember(found)

    def watch(self, told: Sequence[Introduction]) -> None:
        """Begin to compare steps with the plan, if it is one that was predicted; replicas do not compare theirs."""
        parallel = self.life.job.parallel
        if self.agreed.forecast is None or self.plan.local is not None:
            return
        self.detector = StragglerDetector(
            self.group,
            self.plan,
            self.agreed.forecast,
            self.agreed.problem,
            parallel.replan_threshold,
            parallel.replans,
            self.life.condition,
            time.monotonic,
            self.guard.constraints,
            parallel.deadline_seconds,
            max(one.seconds for one in told),
        )

    def improve(self) -> str:
        """Go on by the better plan that the detector has found; return what to say of the layers that have moved."""
        detector, state = self.detector, self.life.state
        assert detector is not None
        assert state is not None
        predicted = human_seconds(detector.forecast.seconds)
        self.say(f"step {state.step}: a new plan, predicted to take {predicted} a step:")
        self.say(detector.plan.describe(self.model.chain.names))
        moved = self._move(senders(holders(self.plan), detector.plan))
        # The problem is that of the devices as they are now.
        self._remember(replace(self.agreed, plan=detector.plan, forecast=detector.forecast, problem=detector.problem))
        self.agreed = replace(self.agreed, plan=self.guard.allowed(self.plan))
        return moved

    def _move(self, moves: Moves) -> str:
        """Bring layers to where another plan has them; return what to say of it."""
        state = self.life.state
        assert state is not None
        moved = sum(self.group.gather_json(move(state, moves, self.group), whole())) if moves else 0
        return f"{human_bytes(moved)} of parameters and optimizer state changed hands"

    def _remember(self, found: Agreed) -> None:
        """Take a plan, also for the next time that these ranks meet."""
        self.agreed = self.life.plans[tuple(self.group.started_as)] = found
