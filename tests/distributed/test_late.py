"""Replicas that go on while another one is late with a synchronisation."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from horizonml.comm.group import Group
from horizonml.engine.local_steps import LocalSession, open_session
from horizonml.engine.session import Wishes
from horizonml.errors import PeerLost
from horizonml.plan.local import Local
from horizonml.tasks.classification import Classification
from tests.distributed.pool import Pool
from tests.distributed.sessions import agreed_state, session_for, state_of
from tests.distributed.test_local import PLAIN, Locally, model_of, worked
from tests.distributed.truth import FULL, LR, RandomBatch, distance

STEPS, SENT = 16, 8
SOON = 0.5  # seconds in which a rank that need not wait would have taken another step by far


def three(local: Local) -> Locally:
    return Locally("three", ((1.0, 2.0, 1.0),), local=local, optimizer=PLAIN)


def ahead(
    rank: int, world_size: int, store: Store, case: Locally, until: int, stop: int = -1
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
    """Train; the last rank takes the step before the sum only once the first one has taken `until`, and waits then.

    Return what all had agreed on before the last step, the state after it, and the steps.
    """
    model = model_of(case)
    group = Group(store, rank, world_size, 30.0)
    session = session_for(case.plan(len(model.chain)), model, group, case.optimizer, FULL)
    assert isinstance(session, LocalSession)
    reports, agreed = [], dict[str, Tensor]()
    for step in range(STEPS):
        if rank == world_size - 1 and step == SENT - 1:
            store.wait([f"done/{until}"])
            time.sleep(SOON)
            assert not store.check([f"done/{until + 1}"]), "nobody waited for this rank"
        if step == STEPS - 1:
            for fragment in session._fragments[0]:
                agreed |= {name: value.clone() for name, value in fragment._by_name(fragment.outer).items()}
        reports.append(
            session.step(RandomBatch(step), LR, Wishes(full=step == STEPS - 1, stop=rank == 0 and step == stop))
        )
        if rank == 0:
            store.set(f"done/{step + 1}", "")
    state = state_of(session)
    session.close()
    group.close()
    return agreed, state, reports


PIPELINES = Locally("two pipelines", ((1.0, 1.0), (1.0, 1.0)), 2, local=Local(8, late=4), optimizer=PLAIN)


@pytest.mark.parametrize(
    ("local", "until"),
    [
        (Local(8, late=4), 11),
        (Local(8, late=4, format="int4"), 11),
        (Local(8, late=4, format="topk"), 11),
        (Local(8, delay=2, late=3), 12),
        (Local(8, fragments=2, delay=1, late=2), 10),
    ],
    ids=lambda value: value.describe() if isinstance(value, Local) else str(value),
)
def test_replicas_go_on_while_another_one_is_late_within_a_bound(pool: Pool, local: Local, until: int) -> None:
    found = pool.run(3, ahead, three(local), until)
    agreed, state, reports = found[0]
    assert [report.ahead for report in reports[SENT:]].count(True) >= local.late
    for other, final, _ in found[1:]:
        assert all(torch.equal(value, agreed[name]) for name, value in other.items())
        assert all(torch.equal(value, state[name]) for name, value in final.items() if name.startswith("model/"))


def test_replicas_of_several_ranks_go_on_together(pool: Pool) -> None:
    first, *others = pool.run(4, ahead, PIPELINES, 11)
    assert [report.ahead for report in first[2][SENT:]].count(True) >= 3
    for _, _, reports in others:
        assert reports[-1].totals == first[2][-1].totals


def test_a_late_update_joins_with_the_weight_of_its_samples(pool: Pool) -> None:
    case = Locally("three", ((1.0,) * 3,), local=Local(8, late=4), optimizer=PLAIN)
    model = model_of(case)
    start = {f"model/{name}": value for name, value in model.stage(0, len(model.chain)).state_dict().items()}
    parts = [case.plan(len(model.chain)).stages[0].parts(RandomBatch(step).size, step) for step in range(SENT)]
    counts = [sum(part[rank][1] - part[rank][0] for part in parts) for rank in range(3)]
    moved = [worked(case, start, [(step, part[rank]) for step, part in enumerate(parts)]) for rank in range(3)]
    agreed, _, _ = pool.run(3, ahead, case, 11)[0]
    for name, value in agreed.items():
        weighted = [count / sum(counts) * own[f"model/{name}"] for count, own in zip(counts, moved, strict=True)]
        assert distance(value, torch.stack(weighted).sum(0)) < 1e-5, name


def test_a_wish_to_stop_ends_the_run_after_a_step_that_is_the_same_for_all(pool: Pool) -> None:
    local = Local(8, late=4)
    for _, _, reports in pool.run(3, ahead, three(local), 11, 2):
        assert [report.totals.stop for report in reports] == [False] * (STEPS - 1) + [True]
    assert local.stops_by(2) == STEPS


def lost(rank: int, world_size: int, store: Store, case: Locally) -> tuple[int, int, dict[str, Tensor]]:
    """Lose the last rank while the others are ahead of it; return where they go on, and the state in the end."""
    model = model_of(case)
    group = Group(PrefixStore("first", store), rank, world_size, 30.0)
    session = session_for(case.plan(len(model.chain)), model, group, PLAIN, FULL)
    for step in range(SENT - 1 if rank == 2 else 11):
        session.step(RandomBatch(step), LR)
    store.set(f"ready/{rank}", "")
    store.wait([f"ready/{other}" for other in range(world_size)])
    group.abort()
    if rank < 2:
        with pytest.raises(PeerLost):
            session.step(RandomBatch(11), LR)
    session.close()
    group.close()
    if rank == 2:
        return 0, 0, {}
    state = session.state
    done = state.own_steps.done if state.own_steps is not None else 0
    group = Group(PrefixStore("second", store), rank, 2, 30.0)
    assert agreed_state(state, True, group) is not None
    plan = Locally("two", ((1.0, 1.0),), local=case.local).plan(len(model.chain))
    again = open_session(plan, state, group, Classification(), FULL)
    again.begin()
    first = state.step
    for step in range(first, STEPS):
        again.step(RandomBatch(step), LR, Wishes(full=step == STEPS - 1))
    tensors = state_of(again)
    again.close()
    group.close()
    return first, done, tensors


def test_a_lost_replica_that_was_late_costs_the_others_no_step(pool: Pool) -> None:
    one, other, _ = pool.run(3, lost, Locally("three", ((1.0,) * 3,), local=Local(8, late=6), optimizer=PLAIN))
    assert one[:2] == other[:2] == (SENT - 1, 11)
    assert all(torch.equal(value, other[2][name]) for name, value in one[2].items() if name.startswith("model/"))
