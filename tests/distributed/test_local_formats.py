"""The formats in which outer gradients travel: how many bytes they take, and that nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.engine.session import Wishes
from horizonml.plan.local import Local
from tests.distributed.pool import Pool
from tests.distributed.sessions import session_for, state_of
from tests.distributed.test_local import PLAIN, Locally, model_of, synchronise, two
from tests.distributed.truth import FULL, LR, RandomBatch, distance


def test_formats_send_less(pool: Pool) -> None:
    bytes_sent = {}
    for format in ("fp32", "int4", "topk"):
        case = Locally("wide", ((1.0,) * 4,), local=Local(4, format=format), model="wide")
        _, reports, _ = pool.run(4, synchronise, case, 4)[0]
        bytes_sent[format] = reports[-1].traffic["members"][0]
    assert bytes_sent["fp32"] / bytes_sent["int4"] == pytest.approx(32 / 4.25, rel=0.01)
    assert bytes_sent["fp32"] / bytes_sent["topk"] == pytest.approx(2 * 4 * 4096 / 116 / 4, rel=0.03)


def settle(rank: int, world_size: int, store: Store, case: Locally, steps: int, whole: int) -> dict[str, Tensor]:
    """Learn in two steps, and let that arrive in the others, of which a run has `whole`."""
    model = model_of(case)
    group = Group(store, rank, world_size, 30.0)
    session = session_for(case.plan(len(model.chain)), model, group, case.optimizer, FULL, steps=whole)
    for step in range(steps):
        session.step(RandomBatch(step % 2), LR if step < 2 else 0.0, Wishes(full=step == 20))
    state = state_of(session)
    session.close()
    group.close()
    return state


@pytest.mark.parametrize("more", [{}, {"fragments": 2, "delay": 1}], ids=["all at once", "late, in fragments"])
@pytest.mark.parametrize("whole", [pytest.param(0, marks=pytest.mark.slow), 1000])
def test_nothing_that_a_sparse_sum_leaves_out_is_lost(pool: Pool, whole: int, more: dict[str, int]) -> None:
    local = Local(4, format="topk", **more)
    begun, plain = (
        pool.run(2, settle, two(replace(local, format="fp32"), optimizer=PLAIN), steps, whole)[0] for steps in (0, 60)
    )
    for state in pool.run(2, settle, two(local, optimizer=PLAIN), 600, whole):
        for name in begun:
            if name.startswith("model/"):
                moved = distance(plain[name], begun[name])
                assert distance(state[name], plain[name]) < 0.02 * moved, name
