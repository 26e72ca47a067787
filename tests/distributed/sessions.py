"""Sessions for tests, and what they hold."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from horizonml.comm.expected import instance, optional, plain
from horizonml.comm.group import Group
from horizonml.engine.local_steps import open_session
from horizonml.engine.session import Session
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import Model, build
from horizonml.plan.plan import Plan
from horizonml.runtime.life import Last
from horizonml.runtime.restore import Copies
from horizonml.state.resume import Memory, Recovery, agree_on_state
from horizonml.state.spec import Adam, Ema, Sgd
from horizonml.state.train_state import TrainState
from horizonml.tasks.classification import Classification
from horizonml.tasks.task import InputSpec, Task


@cache
def built(name: str) -> Model:
    """A model of the tests for images of [1, 8, 8] and ten classes; every session has modules of its own from it."""
    return build(ModelSpec(name=name), 0, 10, InputSpec.of((1, 8, 8)))


def session_for(
    plan: Plan,
    model: Model,
    group: Group,
    optimizer: Sgd | Adam,
    batch_size: int,
    task: Task | None = None,
    ema: Ema | None = None,
    steps: int = 0,
) -> Session:
    """A session on a new state, of a run of so many steps."""
    state = TrainState(model, optimizer, ema, local=plan.local is not None)
    return open_session(plan, state, group, task or Classification(), batch_size, steps=steps)


def state_of(session: Session) -> dict[str, Tensor]:
    """Copies of what a rank holds, put together where members split channels: all ranks must call this."""
    stages = [stage.stage for stage in session.stages.values()]
    whole = [session.state.whole(session.group, stage.start, stage.stop) for stage in stages]
    return {key: value.clone() for tensors in whole for key, value in tensors.items()}


def agreed_state(state: TrainState, begun: bool, group: Group) -> Recovery | None:
    """Where a group goes on from, as its ranks agree when they introduce themselves."""
    return agree_on_state(state, group.exchange(Memory.of(state, begun)))


def copies_in(group: Group, last: Last | None) -> list[Copies | None]:
    """What the ranks of a group have kept of one another's state."""
    own = plain(Copies.of(last)) if last is not None else None
    return group.gather_json(own, optional(instance(Copies)))
