"""Ranks on a pretended device do what ranks on the host do, alone and together with these."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import Model, build
from horizonml.plan.plan import Sync
from horizonml.state.spec import Adam, Ema, Sgd
from horizonml.tasks.task import InputSpec
from tests.distributed.plans import ONE
from tests.distributed.pool import Pool
from tests.distributed.sessions import state_of
from tests.distributed.staged import LateStaging, NarrowStaging, on_device, session_on
from tests.distributed.test_gradients import BY_NAME
from tests.distributed.truth import FULL, LR, SHAPE, Case, RandomBatch, distance, reference
from tests.pretend import Pretended

ALL, ODD, FIRST = "all", "odd", "first"  # which ranks are on the device

EXACT = [
    ("ddp 3 in buckets, a member without samples", ALL),
    ("hybrid 1+2+1, zb-h1, normed", ODD),
    ("two stages a rank in buckets, shares", ODD),
    ("pipeline 3, interleaved, U-Net", FIRST),
    ("hybrid 2+3, gpipe, tied", ODD),
    ("tensor of depthwise, 2", ALL),
    ("tensor of normed, 5", ODD),
]
CASES = [(BY_NAME[name], where) for name, where in EXACT]


def there(rank: int, where: str) -> bool:
    """Whether a rank is on the device."""
    return {ALL: True, ODD: rank % 2 == 1, FIRST: rank == 0}.get(where, False)


def train(
    rank: int, world_size: int, store: Store, case: Case, where: str, extra: dict[str, Any]
) -> tuple[dict[str, Tensor], list[Any], Any]:
    """What a rank holds after some steps, what it reported, and the totals of an evaluation."""
    here = there(rank, where)
    with on_device(here, extra.pop("narrow", False)):
        model = build(ModelSpec(name=f"tests.models:{case.model}"), 0, 10, InputSpec.of(SHAPE))
        group = Group(store, rank, world_size, 30.0)
        try:
            return _train(case, here, model, group, extra)
        finally:
            group.close()


def _train(
    case: Case, here: bool, model: Model, group: Group, extra: dict[str, Any]
) -> tuple[dict[str, Tensor], list[Any], Any]:
    session = session_on(here, case.plan(len(model.chain)), model, group, case.optimizer, FULL, **extra)
    for stage in session.stages.values():
        assert all(isinstance(tensor, Pretended) == here for tensor in stage.module.state_dict().values())
    reports = [session.step(RandomBatch(step), LR, measure_divergence=True) for step in range(3)]
    totals = session.evaluate([RandomBatch(step) for step in range(3)])
    state = state_of(session)
    assert not any(isinstance(value, Pretended) for value in state.values())
    session.close()
    return state, reports, totals


@pytest.mark.parametrize(("case", "where"), CASES, ids=lambda value: getattr(value, "name", value))
def test_gradient_truth_of_ranks_on_a_device(pool: Pool, case: Case, where: str) -> None:
    whole = replace(case, members=(ONE,), sync=Sync.ALL_REDUCE) if case.sync is Sync.CHANNELS else case
    expected, losses, _ = reference(whole)
    for rank, (state, reports, totals) in enumerate(pool.run(case.world_size, train, case, where, {})):
        assert [report.totals.loss for report in reports] == pytest.approx(losses, rel=1e-5), f"rank {rank}"
        for key, value in state.items():
            if key.startswith("model/"):
                assert distance(value, expected[key]) < 1e-5, f"rank {rank}, {key}"
        for report in reports:
            assert report.compute + report.transfer + report.wait == pytest.approx(report.wall, rel=0.02)
        assert totals.samples == 61


OTHERS = [
    (Case("half", ((3.0, 1.0), ONE), 2, sync=Sync.FP16), ODD, {}),
    (Case("powersgd", ((1.0, 1.0),), 2, model="wide", sync=Sync.POWERSGD), ODD, {}),
    (Case("int4", ((3.0, 1.0),), 2, sync=Sync.INT4), ODD, {}),
    (Case("average", ((1.0, 1.0), ONE), 2, optimizer=Adam(name="adam")), ODD, {"ema": Ema(decay=0.9)}),
    (Case("clipped", (ONE, ONE), 2, optimizer=Sgd(clip_norm=0.5)), ALL, {"staging": NarrowStaging, "narrow": True}),
]


@pytest.mark.parametrize(("case", "where", "extra"), OTHERS, ids=lambda value: getattr(value, "name", ""))
def test_ranks_on_a_device_end_where_ranks_on_the_host_do(
    pool: Pool, case: Case, where: str, extra: dict[str, Any]
) -> None:
    mixed = pool.run(case.world_size, train, case, where, extra)
    hosts = pool.run(case.world_size, train, case, "none", {"ema": extra.get("ema")})
    for (state, reports, totals), (other, others, judged) in zip(mixed, hosts, strict=True):
        assert state.keys() == other.keys()
        assert all(distance(state[key], other[key]) < 1e-5 for key in state)
        norms = [[one.gradient_norm or 0.0 for one in steps] for steps in (reports, others)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert totals.loss == pytest.approx(judged.loss, rel=1e-5)


def test_a_copy_is_queued_until_it_is_complete_and_what_waits_for_it_comes_in_order() -> None:
    with on_device(True):
        staging = LateStaging(torch.device("cuda", 0))
        LateStaging.late, seen = 0, list[int]()
        for number in range(2):
            staging.send(torch.full((2,), number, device=staging.device), lambda host: seen.append(int(host[0])))
        assert seen == []
        staging.drain()
        assert seen == [0, 1]
        staging.send(torch.zeros(2, device=staging.device), lambda host: seen.append(2))
        assert seen == [0, 1, 2]  # the third copy is complete at once
