"""Ranks of one machine that measure how much they slow one another down."""

from __future__ import annotations

from contextlib import closing

from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.planner.profile import Contention, Host
from horizonml.profiling.probe import measure_contention
from horizonml.tasks.task import InputSpec
from tests.distributed.pool import Pool


def curve(rank: int, world_size: int, store: Store, name: str) -> Contention:
    """The contention that a rank is told of for a model."""
    model = build(ModelSpec(name=f"tests.models:{name}"), 0, 10, InputSpec.of((1, 8, 8)))
    hosts = [Host(tuple(range(world_size)), 4.0, 1e12)]
    with closing(Group(store, rank, world_size, 60.0)) as group:
        return measure_contention(group, hosts, model, 48)[rank]


def test_all_ranks_of_a_machine_know_what_its_first_has_measured(pool: Pool) -> None:
    curves = pool.run(3, curve, "plain")
    assert curves[0] == curves[1] == curves[2]
    assert [cores for cores, _ in curves[0]] == [1.0, 2.0, 3.0]
    factors = [factor for _, factor in curves[0]]
    assert factors[0] == 1.0
    assert factors == sorted(factors)
    # Of layers that wait, the hundredth part that computes may take several times as long beside other ranks.
    assert max(factor for _, factor in pool.run(2, curve, "slow")[0]) < 1.5
