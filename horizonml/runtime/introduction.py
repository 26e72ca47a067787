"""What the ranks of a new group tell one another, all at once, before anything is decided.

Each rank states what it knows: of its machine, the data, the model, the state in its memory, the plan, its disk. From
the same answers all ranks come to the same decisions, by functions that ask nobody. Only a rank that has to build the
model, or to prove how it can be cut, makes all of them state what they know once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from horizonml.comm.expected import AsJson
from horizonml.comm.group import Group
from horizonml.data.choose import agree, describe
from horizonml.data.dataset import DataInfo
from horizonml.errors import HorizonError, PeerLost, of_kind
from horizonml.machine.accelerator import computing
from horizonml.models.cutting import Cutting
from horizonml.models.zoo import Model
from horizonml.plan.execution import Execution
from horizonml.planner.record import DeviceFacts
from horizonml.planner.strategies import may_cut
from horizonml.runtime.agreement import check_weights, model_for
from horizonml.runtime.capacity import Capacity
from horizonml.runtime.cuts import check_shared_parameters, is_checked, proven_cutting
from horizonml.runtime.life import Life
from horizonml.runtime.recording import device_facts
from horizonml.runtime.restore import Copies
from horizonml.runtime.stragglers import Decision
from horizonml.state.checkpoint import Arrival, FoundCheckpoints
from horizonml.state.resume import Memory
from horizonml.state.runfolder import foreign
from horizonml.state.train_state import TrainState
from horizonml.tasks.choose import channels_for

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
    started_as: list[int]
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
                    raise of_kind(kind, words if len(told) == 1 else f"rank {rank}: {words}")
            if self._is_settled(told):
                return told
        raise PeerLost("the ranks do not come to one description of their model")

    def _own(self) -> Introduction:
        life, group = self.life, self.group
        info = self._try(self._described) if self.problem is None else life.info
        state = life.state
        model = state.model if state is not None else None
        plan = life.plans.get(tuple(self.started_as))
        last = life.last
        if last is not None and state is not None and set(last.members) <= set(self.started_as):
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
            life.measured_among(self.started_as) is not None,
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
