"""A session can be dropped at any moment: the state is that of the last whole step, and nothing else is left."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.errors import PeerLost
from horizonml.job.schema import Sgd
from horizonml.models.zoo import Model
from horizonml.plan.plan import Plan, Stage
from horizonml.state.train_state import TrainState
from horizonml.tasks.classification import Classification
from tests.distributed.pool import Pool
from tests.distributed.sessions import built, state_of
from tests.distributed.truth import FULL, LR, RandomBatch

OPTIMIZER = Sgd(momentum=0.9)
PLANS = {
    "hybrid": Plan((Stage(0, 6, (0,), (1.0,)), Stage(6, 15, (1, 2), (1.0, 1.0))), micro_batches=3),
    "spare": Plan((Stage(0, 6, (2,), (1.0,)), Stage(6, 15, (0,), (1.0,))), micro_batches=3, spare=(1,)),
    "interleaved": Plan(
        tuple(
            Stage(start, stop, (number % 3,), (1.0,))
            for number, (start, stop) in enumerate(itertools.pairwise((0, 2, 5, 7, 10, 12, 15)))
        ),
        "interleaved",
        3,
    ),
}


class Failing(RandomBatch):
    """A batch whose third micro-batch cannot be read, where it enters and where it is judged."""

    def inputs(self, start: int, stop: int) -> Tensor:
        if start >= FULL // 3 * 2:
            raise OSError("the disk is gone")
        return super().inputs(start, stop)

    def targets(self, start: int, stop: int) -> Tensor:
        if start >= FULL // 3 * 2:
            raise OSError("the disk is gone")
        return super().targets(start, stop)


def model() -> Model:
    return built("tests.models:normed")


def dropped(rank: int, world_size: int, store: Store, plan: Plan, fail: bool) -> tuple[dict[str, Tensor], bool, int]:
    """Train two steps, fail in the third if asked to, go on with another group; the state, and what is left."""
    state, unchanged = TrainState(model(), OPTIMIZER), True
    group = Group(PrefixStore("first", store), rank, world_size, 60.0)
    session = Session(plan, state, group, Classification(), FULL)
    for step in range(2):
        session.step(RandomBatch(step), LR)
    held = None
    if fail:
        before = state_of(session)
        try:
            session.step(Failing(3), LR)
        except (OSError, PeerLost) as error:
            held = error  # with its traceback, and all the frames in it
        group.close()
        unchanged = all(torch.equal(value, before[key]) for key, value in state.tensors().items()) and held is not None
        unchanged &= state.step == 2
    session.close()
    hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in _parameters(state))  # type: ignore[attr-defined]
    gradients = sum(parameter.grad is not None for parameter in _parameters(state))
    group.close()
    again = Group(PrefixStore("second", store), rank, world_size, 10.0)
    session = Session(plan, state, again, Classification(), FULL)
    session.step(RandomBatch(2), LR)
    result = state_of(session)
    session.close()
    again.close()
    return result, unchanged, hooks + gradients


def _parameters(state: TrainState) -> list[torch.nn.Parameter]:
    return [tensor for tensor in state._held.values() if isinstance(tensor, torch.nn.Parameter)]


@pytest.mark.parametrize("name", PLANS)
def test_a_step_that_fails_half_way_changes_nothing_and_the_next_group_goes_on(pool: Pool, name: str) -> None:
    plan = PLANS[name]
    straight = pool.run(3, dropped, plan, False)
    started = time.monotonic()
    interrupted = pool.run(3, dropped, plan, True)
    assert time.monotonic() - started < 30, "a group is closed although somebody still looks at the error"
    for (expected, _, _), (state, unchanged, left) in zip(straight, interrupted, strict=True):
        assert unchanged
        assert left == 0
        assert all(torch.equal(value, expected[key]) for key, value in state.items())


def trained(store: Store, rank: int, world_size: int, plan: Plan, steps: int) -> tuple[Session, dict[str, Tensor]]:
    """Train some steps of a model with unusual layers; the session, and copies of what it holds."""
    group = Group(store, rank, world_size, 30.0)
    whole = built("tests.models:averaging")
    session = Session(plan, TrainState(whole, OPTIMIZER), group, Classification(), FULL)
    for step in range(steps):
        session.step(RandomBatch(step), LR)
    return session, state_of(session)


def averaging(rank: int, world_size: int, store: Store, plan: Plan) -> tuple[dict[str, Tensor], float, float]:
    """The state, and the count that is in no checkpoint, before and after the state is loaded."""
    session, state = trained(store, rank, world_size, plan, 2)
    (stage,) = session.stages.values()
    before = float(stage.module.get_buffer("2.seen"))
    assert torch.equal(state["model/2.average"], stage.module.get_buffer("2.average"))
    session.state.load(state.__getitem__, state)
    after = float(stage.module.get_buffer("2.seen"))
    session.close()
    session.group.close()
    return state, before, after


def test_buffers_that_a_module_replaces_are_saved_and_others_begin_anew(pool: Pool) -> None:
    ((state, before, after),) = pool.run(1, averaging, Plan((Stage(0, 5, (0,), (1.0,)),), micro_batches=2))
    assert float(state["model/2.average"].abs().sum()) > 0
    assert (before, after) == (4, 0)


def handing_on(rank: int, world_size: int, store: Store, plan: Plan) -> dict[str, Tensor]:
    session, state = trained(store, rank, world_size, plan, 3)
    session.close()
    session.group.close()
    return state


def test_a_stage_may_hand_on_what_enters_it_with_a_split_backward_pass(pool: Pool) -> None:
    stages = (Stage(0, 3, (0,), (1.0,)), Stage(3, 4, (1,), (1.0,)), Stage(4, 5, (2,), (1.0,)))
    usual, split = (pool.run(3, handing_on, Plan(stages, name, 3)) for name in ("1f1b", "zb-h1"))
    for expected, state in zip(usual, split, strict=True):
        assert all(torch.allclose(state[key], value, rtol=1e-5, atol=1e-7) for key, value in expected.items())
