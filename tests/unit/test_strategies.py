"""Strategies as constraints: what a job's `parallel` section asks of its plan."""

from __future__ import annotations

import itertools

import pytest

from horizonml.errors import JobError, PlanError
from horizonml.job.jobfile import json_schema, parse
from horizonml.plan.plan import STRATEGIES, Plan, Stage, Sync
from horizonml.plan.schedules import SCHEDULES
from horizonml.plan.spec import Strategy
from horizonml.planner.choose import choose
from horizonml.planner.cost import synced_bytes
from horizonml.planner.evaluator import judge
from horizonml.planner.problem import Problem
from horizonml.planner.profile import Host, Network
from horizonml.planner.strategies import (
    constraints_of,
    fixed_plan,
    measures_every_device,
    needs_profile,
    problem_for,
    syncs_of,
)
from horizonml.runtime.launch import for_this_machine
from tests.unit.test_planner import profile


def sync_of(parallel: str, ranks: int = 3) -> list[Sync]:
    """How the members of each stage agree in the plan of a job."""
    job = parse(f"batch_size: 24\nparallel: {parallel}", "job.yaml")
    if not needs_profile(job.parallel, ranks):
        return [stage.sync for stage in fixed_plan(job, 6, ranks).stages]
    hosts = [Host((rank,), 1.0, 1e12) for rank in range(ranks)]
    return [
        stage.sync
        for stage in choose(
            job, problem_for(job, [profile(*[0.001] * 6)] * ranks, hosts, Network(0, 1e9), 0)
        ).plan.stages
        if len(stage.ranks) > 1
    ]


def test_one_machine_trains_with_one_rank_unless_several_are_asked_for() -> None:
    """Five ranks on two cores, which nobody had asked for, were six times as slow as one."""
    told = ["training with 1 rank, which uses all cores of this machine by itself; --workers N starts several"]
    for parallel, ranks, expected in (
        ("{strategy: ddp}", 1, told),
        ("{strategy: single}", 1, []),
        ("{strategy: ddp, min_workers: 2, max_workers: 4}", 2, []),
        ("{strategy: ddp, workers: 3}", 3, []),
        ("{strategy: pipeline}", 5, []),
    ):
        said: list[str] = []
        job = for_this_machine(parse(f"{{device: cpu, parallel: {parallel}}}", "job.yaml"), said.append)
        assert (job.parallel.world_size(), said) == (ranks, expected)


def test_a_job_says_how_members_agree() -> None:
    for parallel, expected in (
        ("{strategy: ddp}", Sync.ALL_REDUCE),
        ("{strategy: ddp, gradient_compression: powersgd}", Sync.POWERSGD),
        ("{strategy: hybrid, workers: 3, gradient_compression: fp16}", Sync.FP16),
        ("{strategy: tensor}", Sync.CHANNELS),
        ("{strategy: horovod}", Sync.HOROVOD),
        ("{strategy: horovod, gradient_compression: fp16}", Sync.HOROVOD_FP16),
        ("{stages: [{ranks: [0, 1, 2], split: channels}]}", Sync.CHANNELS),
        ("{stages: [{ranks: [0, 1, 2], sync: horovod}]}", Sync.HOROVOD),
        ("{stages: [{ranks: [0, 1, 2]}], gradient_compression: powersgd}", Sync.POWERSGD),
        ("{stages: [{ranks: [0, 1, 2], sync: all-reduce}], gradient_compression: fp16}", Sync.ALL_REDUCE),
    ):
        assert set(sync_of(parallel)) == {expected}, parallel


def test_stages_of_one_member_have_nothing_to_agree_on() -> None:
    text = "{gradient_compression: fp16, micro_batches: 2, stages: [{ranks: [0, 1], layers: [0, 2]}, "
    assert sync_of(text + "{ranks: [2], layers: [3, 5]}]}") == [Sync.FP16, Sync.ALL_REDUCE]
    assert sync_of("{strategy: horovod}", 1) == [Sync.ALL_REDUCE]
    assert sync_of("{strategy: tensor}", 1) == [Sync.ALL_REDUCE]


def test_stages_that_cannot_be_are_refused() -> None:
    for stages, words in (
        ("[{ranks: [0, 1], sync: horovod}, {ranks: [2]}]", "by Horovod; only a plan of one stage can"),
        ("[{ranks: [0, 1], sync: channels}, {ranks: [2]}]", "stage 0 splits channels; only a plan of one stage can"),
        ("[{ranks: [0, 1], split: channels, sync: fp16}]", "fp16 does not split channels"),
        ("[{ranks: [0, 0]}]", "names a rank twice"),
        ("[{ranks: [0, 2]}]", "must be 0 to 1, without gaps"),
    ):
        with pytest.raises(JobError, match=words):
            parse(f"parallel: {{stages: {stages}}}", "job.yaml")
    plan = Plan((Stage(0, 2, (0, 1), (1.0, 1.0), Sync.HOROVOD), Stage(2, 4, (2,), (1.0,))))
    with pytest.raises(PlanError, match="stage 0 of the plan sums its gradients by Horovod; only a plan of one stage"):
        plan.check(4, 3)


def test_what_is_summed_follows_from_the_stage() -> None:
    layers = profile(0.001, 0.001, parameters=1000)
    problem = Problem(
        [layers] * 2, [Host((0, 1), 2.0, 1e12)], Network(0.0, 1e3), 4, 0, synced_bytes={"powersgd": (100, 50)}
    )
    expected = {Sync.ALL_REDUCE: 2000, Sync.FP16: 1000, Sync.POWERSGD: 150, Sync.HOROVOD: 2000, Sync.HOROVOD_FP16: 1000}
    for sync, size in expected.items():
        assert synced_bytes(problem, sync, 0, 2) == size
        assert synced_bytes(problem, sync, 1, 2) == size / 2 if sync is not Sync.POWERSGD else 50
    seconds = {
        sync: judge(problem, Plan((Stage(0, 2, (0, 1), (1.0, 1.0), sync),))).prediction.parts["summing gradients"]
        for sync in (Sync.ALL_REDUCE, Sync.FP16, Sync.POWERSGD)
    }
    assert seconds[Sync.FP16] == pytest.approx(seconds[Sync.ALL_REDUCE] / 2)
    assert seconds[Sync.POWERSGD] == pytest.approx(seconds[Sync.ALL_REDUCE] * 0.075)


def test_every_strategy_of_the_job_file_is_in_the_table() -> None:
    assert set(STRATEGIES) == set(Strategy.__args__)  # type: ignore[attr-defined]
    for strategy in STRATEGIES:
        parallel = parse("", "job.yaml", [f"parallel.strategy={strategy}"]).parallel
        assert measures_every_device(parallel) == (strategy == "auto")
        assert syncs_of(parallel) == {STRATEGIES[strategy].sync}
        assert not needs_profile(parallel, 1)
        assert needs_profile(parallel, 4) == (strategy in ("pipeline", "hybrid", "auto"))


def test_the_job_files_schema_lists_the_schedules() -> None:
    names = json_schema()["$defs"]["Parallel"]["properties"]["schedule"]["enum"]
    assert names[0] == "auto"
    assert set(names[1:]) == set(SCHEDULES)
    with pytest.raises(JobError, match=r"parallel\.schedule: '1f1c'.*auto"):
        parse("parallel: {schedule: 1f1c}", "job.yaml")


def test_a_rank_may_be_a_member_of_several_explicit_stages() -> None:
    stages = ", ".join(f"{{ranks: [{rank}], layers: [{n}, {n}]}}" for n, rank in enumerate((0, 1, 0, 1)))
    job = parse(f"parallel: {{micro_batches: 2, stages: [{stages}]}}", "job.yaml")
    assert job.parallel.world_size() == 2
    plan = fixed_plan(job, 4, 2)
    assert [plan.stages_of(rank) for rank in range(2)] == [(0, 2), (1, 3)]
    assert constraints_of(job.parallel).cuts == (1, 2, 3)
    assert [a.start for a, _ in itertools.pairwise(plan.stages)] == [0, 1, 2]
