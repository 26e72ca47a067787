"""A plan that leaves a rank out trains as the others would train without it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.plan.plan import Plan, Stage
from horizonml.state.train_state import TrainState
from horizonml.tasks.classification import Classification
from tests.distributed.pool import Pool
from tests.distributed.sessions import state_of
from tests.distributed.test_session import OPTIMIZER, model
from tests.distributed.truth import FULL, LR, RandomBatch


def stages(ranks: tuple[int, ...]) -> tuple[Stage, ...]:
    """A stage of one member, and one of two."""
    return Stage(0, 6, ranks[:1], (1.0,)), Stage(6, 15, ranks[1:], (2.0, 1.0))


def trained(rank: int, world_size: int, store: Store, plan: Plan) -> tuple[dict[str, Tensor], list[float], int]:
    """Train three steps and evaluate; the state, the losses, and the bytes that the last step sent."""
    group = Group(store, rank, world_size, 30.0)
    session = Session(plan, TrainState(model(), OPTIMIZER), group, Classification(), FULL)
    steps = [session.step(RandomBatch(step), LR) for step in range(3)]
    losses = [*(step.totals.loss for step in steps), session.evaluate([RandomBatch(3)]).loss]
    found = state_of(session), losses, sum(sent for sent, _ in steps[-1].traffic.values())
    session.close()
    group.close()
    return found


def test_the_ranks_that_work_train_as_if_there_were_no_others(pool: Pool) -> None:
    alone = pool.run(3, trained, Plan(stages((0, 1, 2)), micro_batches=3))
    beside = pool.run(4, trained, Plan(stages((3, 0, 2)), micro_batches=3, spare=(1,)))
    for rank, (state, losses, sent) in zip((3, 0, 2), alone, strict=True):
        assert losses == beside[rank][1] == beside[1][1], "all ranks know the loss, also the one that is left out"
        assert state.keys() == beside[rank][0].keys()
        assert state
        assert all(torch.equal(value, beside[rank][0][key]) for key, value in state.items())
        assert sent == beside[rank][2] > 0
    assert not beside[1][0]
    assert beside[1][2] == 0
