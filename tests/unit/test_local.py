"""Local steps on paper: when fragments are synchronised, what a job may ask for, and how large values are coded."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from horizonml.data.samples import BatchRows, JoinedBatch
from horizonml.engine.fragment import BLOCK, KEPT, decode, encode, encoded_bytes
from horizonml.errors import PlanError
from horizonml.job.jobfile import changed, plan_values, read_plan, write_plan
from horizonml.job.schema import Job
from horizonml.plan.local import Local
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.planner.strategies import constraints_of, fixed_plan


def test_fragments_take_turns_and_arrive_before_the_next_one_leaves() -> None:
    local = Local(12, fragments=3, delay=2)
    assert {step: local.sent(step) for step in range(25) if local.sent(step) is not None} == {
        4: 0, 8: 1, 12: 2, 16: 0, 20: 1, 24: 2,
    }  # fmt: skip
    assert [step for step in range(25) if local.applied(step) is not None] == [6, 10, 14, 18, 22]
    uneven = Local(7, fragments=2)
    assert [uneven.sent(step) for step in range(1, 15)] == [
        None, None, 0, None, None, None, 1, None, None, 0, None, None, None, 1,
    ]  # fmt: skip
    assert [Local(1).sent(step) for step in range(4)] == [None, 0, 0, 0]


def test_what_falls_due_waits_for_the_next_synchronisation() -> None:
    local = Local(16)
    assert [step for step in range(1, 100) if local.falls_due(22, step)] == [32, 48, 80, 96]
    assert [step for step in range(1, 40) if local.falls_due(5, step)] == [16, 32]
    assert [step for step in range(1, 20) if Local(1).falls_due(5, step)] == [5, 10, 15]


def test_local_updates_follow_the_share() -> None:
    for share in (0.25, 1 / 3, 1.0, 2.7):
        updates = [Local.updates(share, step) for step in range(100)]
        assert abs(sum(updates) - 100 * share) < 1
        assert max(updates) - min(updates) <= 1


def test_values_that_cannot_be_are_named() -> None:
    for fields, problem in (
        ({"every": 0}, "every: 0"),
        ({"every": 4, "fragments": 5}, "fragments: 5 is not from 1 to `every`, 4"),
        ({"every": 8, "fragments": 2, "delay": 4}, "delay: 4 is not from 0 to 3"),
        ({"every": 8, "format": "int3"}, "format: 'int3' is unknown"),
        ({"every": 8, "learning_rate": 0.0}, r"learning_rate: 0\.0 must be above 0"),
        ({"every": 8, "momentum": 1.0}, r"momentum: 1\.0 must be at least 0 and below 1"),
    ):
        with pytest.raises(PlanError, match=f"the plan's local steps: {problem}"):
            Local(**fields).check()


def test_the_outer_optimizer_suits_the_replicas_unless_a_job_says_otherwise() -> None:
    for fields, for_sgd, for_adam in (
        ({}, (1.0, 0.0), (1.0, 0.5)),
        ({"momentum": 0.9}, (0.7, 0.9), (0.7, 0.9)),
        ({"momentum": 0.0}, (1.0, 0.0), (1.0, 0.0)),
        ({"learning_rate": 0.4, "momentum": 0.6}, (0.4, 0.6), (0.4, 0.6)),
        ({"learning_rate": 0.4}, (0.4, 0.0), (0.4, 0.5)),
        ({"format": "topk"}, (1.0, 0.0), (1.0, 0.0)),
    ):
        sync = job(strategy="ddp", sync={"every": 8, **fields}).parallel.sync
        assert sync is not None
        local = Local.from_json(sync.local().to_json())
        assert (local.outer(4, is_adam=False), local.outer(4, is_adam=True)) == (for_sgd, for_adam)


def test_a_run_says_how_its_replicas_agree_and_warns_of_seldom_synchronisations() -> None:
    assert Local(16).notes(16 * 16, 4, False) == [
        "local steps: the outer optimizer is the plain mean of all replicas (learning rate 1, momentum 0; the default "
        "for SGD), and the replicas agree after every 16 steps, 16 times in this run"
    ]
    (adam,) = Local(16).notes(16 * 16, 4, True)
    assert "is SGD (learning rate 1, momentum 0.5; the default for Adam), and" in adam
    (seldom,) = Local(16).notes(69, 4, False)[1:]
    assert seldom.startswith("warning: parallel.sync.every: 16 leaves 5 synchronisations in a run of 69 steps")
    assert "make it 4 or less" in seldom
    (alone,) = Local(64).notes(40, 4, False)[1:]
    assert "64 is longer than the run of 40 steps" in alone
    told, hasty = Local(8, learning_rate=0.7, momentum=0.9).notes(160, 4, True)
    assert "SGD (learning rate 0.7, momentum 0.9; the job sets learning_rate and momentum)" in told
    assert hasty.startswith(
        "warning: parallel.sync.momentum: 0.9 needs 48 or more synchronisations, and this run has 20"
    )
    assert len(Local(8, learning_rate=0.7, momentum=0.9).notes(8 * 48, 4, True)) == 1


def test_the_next_step_in_which_all_agree_is_known() -> None:
    for local in (Local(1), Local(7), Local(7, 2, 2), Local(12, 3, 2), Local(8, 2, 3)):
        applied = [step for step in range(1, 100) if local.applied(step) is not None]
        for step in range(60):
            assert local.next_applied(step) == next(one for one in applied if one > step), (local, step)


def replicas(*members: tuple[int, ...], shares: tuple[float, ...] = (1.0, 1.0), local: Local | None = None) -> Plan:
    stages = (Stage(number, number + 1, ranks, shares, Sync.LOCAL) for number, ranks in enumerate(members))
    return Plan(tuple(stages), local=local or Local(4))


def test_a_plan_with_local_steps_consists_of_whole_replicas() -> None:
    plan = replicas((0, 1), (2, 3), shares=(3.0, 1.0))
    plan.check(2, 4)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.replicas == ((0, 2), (1, 3))
    alone = plan.replica(1)
    alone.check(2, 2)
    assert [(stage.ranks, stage.shares, stage.sync) for stage in alone.stages] == [
        ((0,), (1.0,), Sync.ALL_REDUCE), ((1,), (1.0,), Sync.ALL_REDUCE),
    ]  # fmt: skip
    assert plan.describe().endswith("local steps, synchronised every 4 steps (fp32)")


def test_plans_that_have_no_whole_replicas_are_refused() -> None:
    pair = replicas((0, 1)).stages
    other = Stage(1, 2, (2, 3), (2.0, 1.0), Sync.LOCAL)
    for plan, ranks, problem in (
        (replace(replicas((0, 1)), local=None), 2, "does not say how often it syncs"),
        (replicas((0, 1), (2,)), 3, "needs a share above 0 for each"),
        (Plan((*pair, Stage(1, 2, (2,), (1.0,), Sync.LOCAL)), local=Local(4)), 3, "has 1 member"),
        (Plan((*pair, Stage(1, 2, (2, 3), (1.0, 1.0))), local=Local(4)), 4, "takes no local steps"),
        (Plan((*pair, other), local=Local(4)), 4, "other shares than stage 0"),
        (replicas((0, 1), (1, 0)), 2, "rank 0 belongs to several replicas"),
        (replicas((0, 1), local=Local(4, fragments=9)), 2, "fragments: 9"),
    ):
        with pytest.raises(PlanError, match=problem):
            plan.check(len(plan.stages), ranks)


def job(**parallel: object) -> Job:
    return Job.model_validate({"parallel": parallel})


def test_jobs_that_cannot_take_local_steps_say_why() -> None:
    every = {"sync": {"every": 4}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"strategy": "single", **every}, "sync: strategy single takes no local steps"),
        ({"strategy": "pipeline", **every}, r"add parallel\.replicas"),
        ({"strategy": "ddp", "gradient_compression": "fp16", **every}, "gradient_compression: with local steps"),
        ({"strategy": "ddp", "replicas": 2, **every}, "replicas: only strategy pipeline"),
        ({"strategy": "pipeline", "replicas": 2, "workers": 5, **every}, "replicas: 5 workers do not form 2 replicas"),
        ({"stages": [{"ranks": [0, 1]}, {"ranks": [2]}], **every}, "stage 1 has 1 rank and stage 0 has 2"),
        ({"stages": [{"ranks": [0, 1], "sync": "fp16"}], **every}, "stage 0 has sync fp16"),
        ({"strategy": "pipeline", "replicas": 2}, "replicas: only strategy pipeline with"),
    ]
    for parallel, problem in cases:
        with pytest.raises(ValidationError, match=problem):
            job(**parallel)


def test_a_job_becomes_a_plan_and_a_file(tmp_path: Path) -> None:
    wanted = job(strategy="ddp", workers=3, sync={"every": 8, "format": "topk"})
    plan = fixed_plan(wanted, 5, 3)
    assert plan.local == Local(8, format="topk")
    assert plan.stages[0].sync is Sync.LOCAL
    alone = fixed_plan(wanted, 5, 1)
    assert (alone.local, alone.stages[0].sync) == (None, Sync.ALL_REDUCE)
    path = tmp_path / "plan.yaml"
    write_plan(plan, path)
    again = read_plan(job(strategy="single"), path)
    assert fixed_plan(again, 5, 3) == plan
    assert plan_values(plan)["sync"] == plan.local.to_json()


def test_replicas_are_as_many_as_the_ranks_allow() -> None:
    wanted = changed(job(strategy="pipeline", workers=4, replicas=2, sync={"every": 8}), {}, "test")
    for ranks, stages in ((4, [(0, 2), (1, 3)]), (6, [(0, 3), (1, 4), (2, 5)]), (3, [(0,), (1,), (2,)])):
        found = constraints_of(wanted.parallel, ranks).stages
        assert found is not None
        assert [stage.ranks for stage in found] == stages
        assert {stage.sync for stage in found} == {Sync.LOCAL if len(stages[0]) > 1 else Sync.ALL_REDUCE}


def test_the_largest_values_of_each_block_arrive() -> None:
    vector = torch.randn(3 * BLOCK + 17, generator=torch.Generator().manual_seed(0))
    encoded = encode(vector)
    assert encoded.numel() == encoded_bytes(vector.numel()) == 4 * 116, "141 times less than float32"
    decoded = decode(encoded, vector.numel())
    for block, found in zip(vector.split(BLOCK), decoded.split(BLOCK), strict=True):
        kept = block.abs().topk(min(KEPT, block.numel())).indices
        assert set(found.nonzero().flatten().tolist()) == set(kept.tolist())
        assert torch.equal(found[kept].sign(), block[kept].sign())
        assert len(set(found[kept].abs().tolist())) == 2, "the larger and the smaller ones"
        assert block.numel() < BLOCK or float((found[kept] - block[kept]).norm()) <= 0.1 * float(block[kept].norm())
    assert torch.equal(decode(encode(torch.zeros(300)), 300), torch.zeros(300))
    few = torch.zeros(300)
    few[[3, 70, 250]] = torch.tensor([2.0, -0.5, 0.5])  # sizes that 16 bits hold
    assert torch.equal(decode(encode(few), 300), few), "zeros stay zeros"
    for broken in (math.inf, math.nan):
        vector[5] = broken
        assert not bool(torch.isfinite(decode(encode(vector), vector.numel()).sum()))


class Counted:
    """A batch whose rows are their numbers."""

    def __init__(self, size: int, first: int) -> None:
        self.size, self._rows = size, torch.arange(first, first + size)

    def inputs(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rows[start:stop], -self._rows[start:stop]

    def targets(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        return {"number": self._rows[start:stop]}


def test_rows_of_several_batches_are_a_batch() -> None:
    rows = JoinedBatch(
        [BatchRows(Counted(10, 0), 8, 10), BatchRows(Counted(10, 100), 0, 0), BatchRows(Counted(10, 200), 1, 4)]
    )
    assert rows.size == 5
    found, negative = rows.inputs(0, 5)
    assert found.tolist() == [8, 9, 201, 202, 203]
    assert torch.equal(negative, -found)
    assert rows.targets(1, 3)["number"].tolist() == [9, 201]  # type: ignore[index,call-overload]
    first, second = rows.split(2)
    assert [first.inputs(0, first.size)[0].tolist(), second.inputs(0, second.size)[0].tolist()] == [
        [8, 9], [201, 202, 203],
    ]  # fmt: skip
    assert [piece.size for piece in rows.split(8)] == [1] * 5
