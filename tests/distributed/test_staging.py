"""Ranks on a pretended device do what ranks on the host do, alone and together with these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from horizonml.plan.plan import Sync
from horizonml.state.spec import Adam, Ema, Sgd
from tests.distributed.plans import ONE, TWO
from tests.distributed.pool import Pool
from tests.distributed.staged import LateStaging, OnDevice, run_narrowly, run_on
from tests.distributed.test_gradients import BY_NAME, expect_parameters_of_one_process
from tests.distributed.truth import Case, Images, distance, trained
from tests.pretend import PretendDevice

ALL, ODD, FIRST = frozenset(range(5)), frozenset((1, 3)), frozenset((0,))  # which ranks are on the device
EXACT = [
    ("ddp 3 in buckets, a member without samples", ALL),
    ("hybrid 1+2+1, zb-h1, normed", ODD),
    ("two stages a rank in buckets, shares", ODD),
    ("pipeline 3, interleaved, U-Net", FIRST),
    ("hybrid 2+3, gpipe, tied", ODD),
    ("tensor of depthwise, 2", ALL),
    ("tensor of normed, 5", ODD),
    ("averaged: hybrid 2x2", ODD),
]
CASES = [(BY_NAME[name], where) for name, where in EXACT]


@pytest.mark.parametrize(("case", "where"), CASES, ids=[name for name, _ in EXACT])
def test_gradient_truth_of_ranks_on_a_device(pool: Pool, case: Case, where: frozenset[int]) -> None:
    for end in expect_parameters_of_one_process(OnDevice(pool, where), case):
        for report in end.reports:
            assert report.compute + report.transfer + report.wait == pytest.approx(report.wall, rel=0.02)


OTHERS = [
    (Case("half", ((3.0, 1.0), ONE), 2, sync=Sync.FP16), ODD, run_on),
    (Case("powersgd", (TWO,), 2, model="wide", sync=Sync.POWERSGD), ODD, run_on),
    (Case("int4", ((3.0, 1.0),), 2, sync=Sync.INT4), ODD, run_on),
    (Case("average", (TWO, ONE), 2, optimizer=Adam(name="adam"), ema=Ema(decay=0.9)), ODD, run_on),
    (Case("no 64-bit floats", (ONE, ONE), 2, optimizer=Sgd(clip_norm=0.5)), ALL, run_narrowly),
]


@pytest.mark.parametrize(("case", "where", "run"), OTHERS, ids=[case.name for case, *_ in OTHERS])
def test_ranks_on_a_device_end_where_ranks_on_the_host_do(
    pool: Pool, case: Case, where: frozenset[int], run: Callable[..., Any]
) -> None:
    mixed = pool.run(case.world_size, run, where, trained, case, Images(case.model))
    hosts = pool.run(case.world_size, trained, case, Images(case.model))
    for one, other in zip(mixed, hosts, strict=True):
        assert one.state.keys() == other.state.keys()
        assert all(distance(one.state[key], other.state[key]) < 1e-5 for key in one.state)
        norms = [[report.gradient_norm or 0.0 for report in end.reports] for end in (one, other)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert one.judged.loss == pytest.approx(other.judged.loss, rel=1e-5)


def test_a_copy_is_queued_until_it_is_complete_and_what_waits_for_it_comes_in_order() -> None:
    with PretendDevice():
        staging = LateStaging(torch.device("cuda", 0))
        LateStaging.late, seen = 0, list[int]()
        for number in range(2):
            staging.send(torch.full((2,), number, device=staging.device), lambda host: seen.append(int(host[0])))
        assert seen == []
        staging.drain()
        assert seen == [0, 1]
        staging.send(torch.zeros(2, device=staging.device), lambda host: seen.append(2))
        assert seen == [0, 1, 2]  # the third copy is complete at once
