"""Members of a stage begin with the same state, bit for bit, whatever was measured before."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.machine.host import rss_bytes
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import Model, build
from horizonml.plan.plan import Plan, Stage
from horizonml.planner.profile import Host
from horizonml.profiling.measure import measure
from horizonml.runtime.checks import Capacity, find_hosts
from horizonml.state.carry import share_state
from horizonml.state.spec import Sgd
from horizonml.tasks.task import InputSpec
from tests.distributed.pool import Pool
from tests.distributed.sessions import session_for, state_of
from tests.distributed.truth import expect_same


def normed() -> Model:
    return build(ModelSpec(name="tests.models:normed"), 0, 10, InputSpec.of((1, 8, 8)))


def test_measuring_leaves_what_is_trained_as_it_was() -> None:
    measured, untouched = normed(), normed()
    measure(measured, (4, 16))
    layers = len(measured.chain)
    ours, theirs = (model.stage(0, layers).state_dict() for model in (measured, untouched))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def hosts_of(rank: int, world_size: int, store: Store, nodes: list[str]) -> list[Host]:
    group = Group(store, rank, world_size, 30.0, nodes)
    try:
        return find_hosts(group, group.exchange(Capacity.here(group, rss_bytes())))
    finally:
        group.close()


def test_memory_is_shared_by_ranks_of_one_machine_and_not_of_one_name(pool: Pool) -> None:
    """Nodes are told by boot id and address; what the boards are called does not matter."""
    everyone = pool.run(3, hosts_of, ["boot1/10.0.0.1", "boot2/10.0.0.2", "boot2/10.0.0.2"])
    alone, shared = everyone[0]
    assert (alone.ranks, shared.ranks) == ((0,), (1, 2))
    assert shared.memory < alone.memory / 1.5


def unequal(rank: int, world_size: int, store: Store) -> tuple[list[tuple[int, str]], dict[str, Tensor]]:
    group = Group(store, rank, world_size, 30.0)
    plan = Plan((Stage(0, len(normed().chain), tuple(range(world_size)), (1.0,) * world_size),))
    session = session_for(plan, normed(), group, Sgd(), 64)
    if rank == 2:
        session.stages[min(session.stages)].module.state_dict()["1.running_mean"] += 1e-6
    try:
        return share_state(session.state, plan, group), state_of(session)
    finally:
        group.close()


def test_a_member_that_begins_otherwise_is_named_and_takes_over_the_first_members_state(pool: Pool) -> None:
    results = pool.run(3, unequal)
    for found, state in results:
        assert found == [(2, "model/1.running_mean")]
        expect_same(state, results[0][1])
