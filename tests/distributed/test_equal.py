"""Members of a stage begin and end with the same state, bit for bit, whatever was measured before."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.data.choose import load
from horizonml.job.jobfile import parse
from horizonml.job.schema import Job
from horizonml.machine.host import rss_bytes
from horizonml.machine.signals import StopRequest
from horizonml.models.zoo import build
from horizonml.plan.plan import Plan, Stage
from horizonml.planner.profile import Host
from horizonml.profiling.measure import measure
from horizonml.runtime.agreement import describe_together, make_plan
from horizonml.runtime.capacity import Capacity, find_hosts
from horizonml.runtime.trainer import Outcome, Training
from horizonml.state.carry import share_state
from horizonml.state.spec import Sgd
from horizonml.tasks.task import InputSpec
from horizonml.telemetry.progress import Silent
from horizonml.telemetry.recorder import Recorder
from tests.distributed.pool import Pool
from tests.distributed.sessions import session_for, state_of
from tests.records import run_info


def job(folder: Path, **parallel: Any) -> Job:
    values = {
        "folder": str(folder),
        "epochs": 1,
        "batch_size": 32,
        "model": {"name": "tests.models:normed"},
        "data": {"name": "digits", "samples": 96},
        "parallel": parallel,
    }
    return parse(json.dumps(values), "job")


def test_measuring_leaves_what_is_trained_as_it_was(tmp_path: Path) -> None:
    spec = job(tmp_path, strategy="single").model
    measured, untouched = (build(spec, 0, 10, InputSpec.of((1, 8, 8))) for _ in range(2))
    measure(measured, (4, 16))
    layers = len(measured.chain)
    ours, theirs = (model.stage(0, layers).state_dict() for model in (measured, untouched))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def trained(
    rank: int, world_size: int, store: Store, job: Job, cache: Path
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Plan, by a profile that is measured if the cache is empty, and train; the plan and this rank's state."""
    os.environ["HORIZONML_CACHE"] = str(cache / str(rank))
    group = Group(store, rank, world_size, 30.0)
    try:
        info, model = describe_together(job, group)
        hosts = [Host(tuple(range(world_size)), 1.0, 1e12)]
        agreed = make_plan(job, model, info, group, hosts, ["here"] * world_size, lambda text: None)
        session = session_for(agreed.plan, model, group, job.optimizer, job.batch_size)
        assert share_state(session.state, agreed.plan, group) == []
        data = load(job.data, info, cache, inputs=session.is_first, targets=session.is_last)
        recorder = Recorder(job.run_folder / f"rank-{rank}.jsonl", Silent(), run_info(job, session.plan, rank), 0)
        assert Training(job, session, data, None, recorder, StopRequest()).run() is Outcome.COMPLETE
        return session.plan.to_json(), state_of(session)
    finally:
        group.close()
        del os.environ["HORIZONML_CACHE"]


def test_a_run_that_measured_first_equals_one_that_did_not(pool: Pool, tmp_path: Path) -> None:
    hybrid = job(
        tmp_path,
        schedule="1f1b",
        stages=[{"ranks": [0, 1]}, {"ranks": [2]}],  # where to cut is left to the profile, which rank 0 measures
    )
    cold = pool.run(3, trained, hybrid, tmp_path / "cache")
    assert list((tmp_path / "cache" / "0").rglob("*.json")), "nothing was measured"
    for _ in range(10):  # the links are measured anew each time, and on a busy machine the plan may follow them
        warm = pool.run(3, trained, hybrid, tmp_path / "cache")
        if warm[0][0] == cold[0][0]:
            break
    for rank, (plan, state) in enumerate(cold):
        others = [other for other_plan, other in [*cold, *warm] if other.keys() == state.keys()]
        assert len(others) == (4, 4, 2)[rank]  # the members of its stage, in two runs
        assert all(torch.equal(state[name], other[name]) for other in others for name in state)
        assert plan == warm[0][0]


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
    spec = parse('{"model": {"name": "tests.models:normed"}}', "job").model
    model = build(spec, 0, 10, InputSpec.of((1, 8, 8)))
    plan = Plan((Stage(0, len(model.chain), tuple(range(world_size)), (1.0,) * world_size),))
    session = session_for(plan, model, group, Sgd(), 64)
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
        assert all(torch.equal(state[name], results[0][1][name]) for name in state)
