"""Compressed links and sums: fewer bytes, nearly the same parameters, and still the same on all members of a stage."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import Store
from torch.futures import Future

from horizonml.comm.group import Group
from horizonml.engine.quantise import encoded_bytes
from horizonml.engine.session import Wishes
from horizonml.engine.sync.compressed import CodedSum
from horizonml.errors import PeerLost
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.state.spec import Sgd
from tests.distributed.pool import Pool
from tests.distributed.sessions import built, session_for, state_of
from tests.distributed.truth import FULL, LR, RandomBatch

ONE = (1.0,)
WHOLE = {Sync.POWERSGD: 10}  # steps in which sums are whole


def train(
    rank: int,
    world_size: int,
    store: Store,
    members: tuple[int, ...],
    model_name: str,
    send: str,
    sync: Sync,
    steps: int,
) -> tuple[dict[str, Tensor], list[Any]]:
    """What a rank holds after some steps of a plan with so many members per stage, and what it reported."""
    model = built(f"tests.models:{model_name}")
    stages, first = [], 0
    for number, count in enumerate(members):
        start, stop = (len(model.chain) * (number + k) // len(members) for k in (0, 1))
        stages.append(Stage(start, stop, tuple(range(first, first + count)), (1.0,) * count, sync, send))
        first += count
    group = Group(store, rank, world_size, 30.0)
    plan = Plan(tuple(stages), micro_batches=2)
    session = session_for(plan, model, group, Sgd(momentum=0.5), FULL)
    reports = [session.step(RandomBatch(step), LR / 10, Wishes(measure_divergence=True)) for step in range(steps)]
    state = state_of(session)
    group.close()
    return state, reports


def deviation(state: dict[str, Tensor], exact: dict[str, Tensor], model_name: str) -> float:
    """How far parameters are from where they should be, compared with the way that they have come."""
    model = built(f"tests.models:{model_name}")
    start = model.stage(0, len(model.chain)).state_dict()
    names = [name for name in start if f"model/{name}" in state and "running" not in name and "tracked" not in name]
    apart = torch.cat([(state[f"model/{name}"] - exact[f"model/{name}"]).flatten() for name in names])
    moved = torch.cat([(exact[f"model/{name}"] - start[name]).flatten() for name in names])
    return float(apart.norm() / moved.norm())


@pytest.mark.parametrize(
    ("model", "send", "bytes_ratio", "error"),
    [
        ("plain", "bf16", 0.5, 0.01),
        pytest.param("normed", "int8", 0.25, 0.05, marks=pytest.mark.slow),
        ("normed", "int4", 0.1328, 0.3),
    ],
)
def test_links_send_less(pool: Pool, model: str, send: str, bytes_ratio: float, error: float) -> None:
    exact, compressed = (pool.run(4, train, (1, 2, 1), model, name, Sync.ALL_REDUCE, 4) for name in ("fp32", send))
    for (state, reports), (other, exact_reports) in zip(compressed, exact, strict=True):
        for direction in ("previous", "next"):
            for before, after in zip(exact_reports[0].traffic[direction], reports[0].traffic[direction], strict=True):
                assert bytes_ratio * before <= after <= 1.1 * bytes_ratio * before
        assert 0 < deviation(state, other, model) < error
        for report in reports:
            assert report.compute + report.transfer + report.wait == pytest.approx(report.wall, rel=0.02)


@pytest.mark.parametrize(
    ("model", "sync", "error"),
    [
        ("wide", Sync.FP16, 0.002),
        pytest.param("wide", Sync.POWERSGD, 0.3, marks=pytest.mark.slow),
        ("normed", Sync.INT4, 0.2),
    ],
)
def test_sums_send_less(pool: Pool, model: str, sync: Sync, error: float) -> None:
    whole = WHOLE.get(sync, 0)
    exact, compressed, again = (
        pool.run(3, train, (3,), model, "fp32", way, whole + 4) for way in (Sync.ALL_REDUCE, sync, sync)
    )
    for (state, reports), (other, exact_reports), (repeated, _) in zip(compressed, exact, again, strict=True):
        assert all(torch.equal(state[key], repeated[key]) for key in state)
        assert all(torch.equal(state[key], compressed[0][0][key]) for key in state)
        if model == "wide":
            ratio = 0.2 if whole else 0.5
            assert reports[-1].bytes_sent < 1.01 * ratio * exact_reports[-1].bytes_sent
        assert 0 < deviation(state, other, model) < error
        # That of a single step depends on where the training is by then, which is not the same place in both.
        own, usual = (median(report.divergence for report in found[-10:]) for found in (reports, exact_reports))
        assert own == pytest.approx(usual, rel=0.3)
        early, exactly = ([report.totals.loss for report in found[:whole]] for found in (reports, exact_reports))
        assert early == pytest.approx(exactly, rel=1e-4)


def lose_a_member(rank: int, world_size: int, store: Store, sync: Sync) -> float:
    """Train until rank 1 breaks its connections in the middle of a step; how long it took a survivor to notice."""
    model = built("tests.models:wide")
    group = Group(store, rank, world_size, 300.0)
    members = tuple(range(world_size))
    plan = Plan((Stage(0, len(model.chain), members, (1.0,) * world_size, sync),))
    session = session_for(plan, model, group, Sgd(), FULL)
    begun = WHOLE.get(sync, 0) + 1
    for step in range(begun):
        session.step(RandomBatch(step), LR / 10)
    if rank == 1:
        # In the middle of a sum: the others have begun it and this member never does.
        store.wait(["summing"], timedelta(seconds=60))
        time.sleep(0.5)
        store.set("lost", str(time.time()))
        group.abort()
        group.close()
        return 0.0

    def tell() -> None:
        """Break off, as the rendezvous service makes survivors do, because gloo misses a loss now and then."""
        while not store.check(["lost"]):
            time.sleep(0.05)
        group.abort()

    store.set("summing", "")
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        for step in range(begun, 10**6):
            session.step(RandomBatch(step), LR / 10)
    except PeerLost:
        noticed = time.time()
    teller.join()
    group.close()
    return noticed - float(store.get("lost"))


@pytest.mark.parametrize("kind", ["fp16", "powersgd", "int4"])
def test_a_member_that_is_lost_is_noticed_in_the_middle_of_a_compressed_sum(pool: Pool, kind: str) -> None:
    assert max(pool.run(3, lose_a_member, Sync.named(kind))) < 30  # the group's time-out is 300 s


def unanswered(rank: int, world_size: int, store: Store) -> str:
    """Wait for a chain of sums that never ends, while the group is broken off."""
    group = Group(store, rank, world_size, 300.0)
    store.set(f"connected/{rank}", "")
    store.wait([f"connected/{peer}" for peer in range(world_size)])  # before one of them breaks off
    endless: Future[Any] = Future()
    work = group.follow(endless)
    group.abort()
    try:
        group.wait(work)
    except PeerLost as error:
        return str(error)
    finally:
        group.close()
    return "nothing"


def test_a_chain_of_sums_is_waited_for_no_longer_than_the_group_lasts(pool: Pool) -> None:
    assert pool.run(2, unanswered) == ["the group was broken off"] * 2


def sum_coded(rank: int, world_size: int, store: Store, values: int, times: int) -> tuple[list[Tensor], int]:
    """The sums of the same vectors, several times, and the bytes that each took this rank to send."""
    group = Group(store, rank, world_size, 30.0)
    coded = CodedSum(group, range(world_size), group.channel("coded").tag(), values)
    sums = []
    for _ in range(times):
        vector = torch.randn(values, generator=torch.Generator().manual_seed(rank)) * 10**rank
        work = coded.begin(vector)
        work.wait()
        sums.append(vector)
    group.close()
    return sums, coded.bytes_sent


@pytest.mark.parametrize("values", [1, 5000])
def test_what_a_coded_sum_leaves_out_comes_later(pool: Pool, values: int) -> None:
    results = pool.run(3, sum_coded, values, times := 20)
    exact = sum(torch.randn(values, generator=torch.Generator().manual_seed(r)) * 10**r for r in range(3))
    assert isinstance(exact, Tensor)
    for sums, _ in results:
        assert all(torch.equal(one, other) for one, other in zip(sums, results[0][0], strict=True))
        apart = [float((one - exact).norm() / exact.norm()) for one in sums]
        assert values == 1 or 0.02 < apart[0] < 0.3
        mean = torch.stack(sums).mean(0)
        assert float((mean - exact).norm() / exact.norm()) < 4 * max(apart) / times
    sent = [size for _, size in results]
    assert sum(sent) == pytest.approx(2 * 2 * encoded_bytes(values), abs=4 * 3 * 4)  # both ways, to two others
