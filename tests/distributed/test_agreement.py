"""What the ranks of a group are told when they agree on a plan."""

from __future__ import annotations

import pytest
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.errors import PlanError
from horizonml.job.jobfile import parse
from horizonml.planner.profile import Host
from horizonml.runtime.agreement import describe_together, make_plan
from tests.distributed.pool import Pool


def agree(rank: int, world_size: int, store: Store) -> list[str]:
    """What this rank says while a pipeline of a model that uses a module twice is planned."""
    changes = ["model.name=tests.models:Returning", "parallel.strategy=pipeline", f"parallel.workers={world_size}"]
    job, said = parse("batch_size: 32", "job.yaml", changes), list[str]()
    group = Group(store, rank, world_size, 60.0)
    try:
        info, model = describe_together(job, group)
        hosts = [Host(tuple(range(world_size)), 4.0, 1e12)]
        make_plan(job, model, info, group, hosts, ["here"] * world_size, said.append)
    except PlanError as error:
        said.append(str(error))
    finally:
        group.close()
    return [line for line in said if "measur" not in line]  # which may also say that the device was busy


@pytest.mark.slow
def test_a_module_used_twice_that_leaves_nothing_to_cut_is_told_with_what_it_costs(pool: Pool) -> None:
    (warning, *drawbacks), others = pool.run(2, agree)
    assert "takes " in warning
    assert "and cannot be cut, because gate.weight is used both by gate and by gate_1" in warning
    assert "With ddp a step is predicted to take " in warning
    assert ", with this plan " in warning
    assert all(line.startswith("warning: this plan is predicted to be slower than ") for line in drawbacks)
    assert others == []


def test_a_pipeline_that_is_impossible_says_what_keeps_the_model_together(pool: Pool) -> None:
    for (message,) in pool.run(5, agree):
        assert "can be cut into at most 4 stages, but the plan needs 5" in message
        assert "because gate.weight is used both by gate and by gate_1" in message


def agree_on_ddp(rank: int, world_size: int, store: Store, cores: float) -> list[str]:
    """What this rank says when ranks of a machine with so many cores are asked for ddp, and nothing was measured."""
    job, said = parse("{batch_size: 32, seed: 77, parallel: {strategy: ddp}}", "job.yaml"), list[str]()
    group = Group(store, rank, world_size, 60.0)
    try:
        info, model = describe_together(job, group)
        make_plan(job, model, info, group, [Host((0, 1), cores, 1e12)], ["here"] * 2, said.append)
    finally:
        group.close()
    return said


def test_ranks_that_only_share_a_core_are_told_that_one_would_train_faster(pool: Pool) -> None:
    (told,), others = pool.run(2, agree_on_ddp, 1.0)
    assert told.startswith("warning: ")
    assert "share the 1 core of this machine" in told
    assert others == []
